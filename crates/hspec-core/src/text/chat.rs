//! Chat templates: messages to the text that a model was taught to answer.

use super::{clock, special_token};
use crate::{
    checkpoint::model_json,
    error::{Error, Result},
};
use minijinja::{Environment, ErrorKind, Value, syntax::SyntaxConfig, value::Kwargs};
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

/// One turn of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// Who speaks: `system`, `user` or `assistant`.
    pub role: String,
    /// What was said.
    pub content: String,
}

impl Message {
    /// A turn of the user.
    pub fn user(content: impl Into<String>) -> Self {
        Self { role: "user".to_owned(), content: content.into() }
    }

    /// A turn of the assistant.
    pub fn assistant(content: impl Into<String>) -> Self {
        Self { role: "assistant".to_owned(), content: content.into() }
    }

    /// Whether the assistant speaks.
    pub fn is_assistant(&self) -> bool {
        self.role == "assistant"
    }
}

/// A model's chat template, rendered as Hugging Face's tools do: Jinja with Python's methods, blocks that
/// leave no empty lines, `raise_exception` and `strftime_now`.
///
/// ```
/// use hspec_core::text::{ChatTemplate, Message};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let model = tempfile::tempdir()?;
/// let template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}\
///     {% if add_generation_prompt %}<assistant>{% endif %}";
/// std::fs::write(model.path().join("chat_template.jinja"), template)?;
///
/// let chat = ChatTemplate::open(model.path())?.expect("the folder has a template");
/// assert_eq!(chat.render(&[Message::user("Hello")], true)?, "<user>Hello<assistant>");
/// # Ok(())
/// # }
/// ```
pub struct ChatTemplate {
    file: PathBuf,
    hash: String,
    environment: Environment<'static>,
    /// `bos_token` and the like.
    special: BTreeMap<&'static str, String>,
    thinking: Option<bool>,
}

const NAME: &str = "chat_template";

impl ChatTemplate {
    /// Opens the template of a model's folder (`chat_template.jinja`, or in `tokenizer_config.json` a text
    /// or a list with one named `default`) or of a GGUF file. `None` where the model has none, as base
    /// models do.
    ///
    /// # Errors
    /// [`Error::Io`] and [`Error::Invalid`] where a file cannot be read or the template is no Jinja.
    pub fn open(model: &Path) -> Result<Option<Self>> {
        let config = model_json(model, "tokenizer_config.json")?.unwrap_or_default();
        let separate = model.join("chat_template.jinja");
        let (file, source) = if separate.is_file() {
            let source = std::fs::read_to_string(&separate).map_err(Error::io(&separate))?;
            (separate, source)
        } else {
            let Some(source) = listed_template(&config) else { return Ok(None) };
            (model.to_owned(), source.to_owned())
        };
        let special = ["bos_token", "eos_token", "unk_token", "pad_token"];
        let special =
            special.iter().filter_map(|&name| Some((name, special_token(&config, name)?.to_owned())));
        Self::new(file, source, special.collect()).map(Some)
    }

    fn new(file: PathBuf, source: String, special: BTreeMap<&'static str, String>) -> Result<Self> {
        let invalid = |e: minijinja::Error| Error::invalid(&file, NAME, e.to_string(), "a Jinja template");
        let mut environment = Environment::new();
        let syntax =
            SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().map_err(invalid)?;
        environment.set_syntax(syntax);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", strftime_now);
        environment.add_filter("tojson", tojson);
        let parts = special.iter().flat_map(|(name, token)| [*name, token.as_str()]);
        let bytes = std::iter::once(source.as_str()).chain(parts).flat_map(|s| s.bytes().chain([0]));
        let hash = format!("{:016x}", hspec_nn::params::fingerprint(bytes));
        environment.add_template_owned(NAME, without_generation_tags(&source)).map_err(invalid)?;
        Ok(Self { file, hash, environment, special, thinking: None })
    }

    /// A hash of the template and of the special tokens that it writes: the same for all that render alike.
    pub fn hash(&self) -> &str {
        &self.hash
    }

    /// Tells templates that ask for `enable_thinking`, as those of Qwen3 do, whether the model is to think
    /// before it answers; unless told, they decide themselves.
    #[must_use]
    pub fn thinking(self, thinking: bool) -> Self {
        Self { thinking: Some(thinking), ..self }
    }

    /// The text before the first user's message, from which a model goes on as the user, and the text behind it.
    ///
    /// # Errors
    /// Those of [`render`](Self::render), and [`Error::Request`] where the template does not write the message as
    /// it is.
    pub fn user_turn(&self) -> Result<(String, String)> {
        // Of the private use plane: no template writes it by itself.
        const MARK: char = '\u{f0000}';
        let text = self.render(&[Message::user(MARK)], false)?;
        let around = text.split_once(MARK).ok_or_else(|| Error::Request {
            what: "chat template",
            found: format!("a user's message is not in {text:?}"),
            expected: "a template that writes it as it is".to_owned(),
        });
        around.map(|(before, behind)| (before.to_owned(), behind.to_owned()))
    }

    /// The text of a conversation; with `add_generation_prompt` it ends where the assistant's next turn
    /// begins.
    ///
    /// # Errors
    /// [`Error::Request`] where the template refuses the messages, [`Error::Invalid`] where it fails
    /// otherwise.
    pub fn render(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String> {
        let messages = messages.iter().map(|message| {
            minijinja::context! { role => message.role.as_str(), content => message.content.as_str() }
        });
        let special = self.special.iter().map(|(&name, token)| (name, Value::from(token.as_str())));
        let context = special.chain([
            ("messages", messages.collect()),
            ("add_generation_prompt", add_generation_prompt.into()),
        ]);
        let context = context.chain(self.thinking.map(|thinking| ("enable_thinking", thinking.into())));
        let template = self.environment.get_template(NAME).expect("`new` added it");
        template.render(context.collect::<BTreeMap<_, Value>>()).map_err(|e| match raised(&e) {
            Some(message) => Error::Request {
                what: "messages",
                found: message.to_owned(),
                expected: "messages that the chat template accepts".to_owned(),
            },
            None => Error::invalid(&self.file, NAME, e.to_string(), "a template that renders these messages"),
        })
    }
}

/// Trainers mark the assistant's text in a template with `{% generation %}` .. `{% endgeneration %}`, which no
/// Jinja knows. Where blocks end a line counts, so that another block takes the place of each.
fn without_generation_tags(source: &str) -> String {
    let mut parts = source.split("{%");
    let mut text = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        text += "{%";
        let inside = part.trim_start_matches(['-', '+']).trim_start();
        let known = ["generation", "endgeneration"].iter().zip(["if true", "endif"]).find(|(tag, _)| {
            let rest =
                inside.strip_prefix(**tag).map(|rest| rest.trim_start().trim_start_matches(['-', '+']));
            rest.is_some_and(|rest| rest.starts_with("%}"))
        });
        match known {
            Some((tag, other)) => text += &part.replacen(tag, other, 1),
            None => text += part,
        }
    }
    text
}

fn listed_template(config: &serde_json::Value) -> Option<&str> {
    let template = config.get(NAME)?;
    if let Some(list) = template.as_array() {
        let default = list.iter().find(|entry| entry.get("name").is_some_and(|name| name == "default"));
        return default?.get("template")?.as_str();
    }
    template.as_str()
}

/// Marks errors that the template itself raised.
const RAISED: &str = "raised by the template: ";

fn raise_exception(message: String) -> Result<Value, minijinja::Error> {
    Err(minijinja::Error::new(ErrorKind::InvalidOperation, format!("{RAISED}{message}")))
}

fn raised(error: &minijinja::Error) -> Option<&str> {
    error.detail()?.strip_prefix(RAISED)
}

fn strftime_now(format: &str) -> Result<String, minijinja::Error> {
    clock::format_now(format).map_err(|e| minijinja::Error::new(ErrorKind::InvalidOperation, e))
}

/// JSON as Python writes it. Minijinja's own filter also hides characters from HTML, which would put
/// other tokens into a prompt.
fn tojson(value: &Value) -> Result<String, minijinja::Error> {
    match value.as_str() {
        Some(text) => serde_json::to_string(text)
            .map_err(|e| minijinja::Error::new(ErrorKind::InvalidOperation, e.to_string())),
        None => {
            Ok(minijinja::filters::tojson(value, None, Kwargs::from_iter::<[(&str, Value); 0]>([]))?
                .to_string())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn template(source: &str) -> Result<ChatTemplate> {
        let special = BTreeMap::from([("bos_token", "<s>".to_owned()), ("eos_token", "</s>".to_owned())]);
        ChatTemplate::new("model/tokenizer_config.json".into(), source.to_owned(), special)
    }

    fn render(source: &str, messages: &[Message]) -> Result<String> {
        template(source)?.render(messages, true)
    }

    /// Expected texts worked out from Jinja's documentation with trim_blocks and lstrip_blocks on.
    #[test]
    fn jinja_as_hugging_face_sets_it() {
        let two =
            [Message::user(" a <b> 'c' "), Message { role: "assistant".into(), content: "d\n\"e\"".into() }];
        for (source, expected) in [
            ("{{ bos_token }}x{{ unk_token }}\n{{ eos_token }}\n", "<s>x\n</s>"),
            (
                "{% for m in messages %}\n  {% if 1 %}\n{{ m.content.strip() }}\n  {% endif %}\n{% endfor %}",
                "a <b> 'c'\nd\n\"e\"\n",
            ),
            ("{{ messages[0]['content'] | trim }}|{{ messages[1:] | length }}", "a <b> 'c'|1"),
            (
                "{{ messages[0].content | tojson }}{{ messages[1].content | tojson }}",
                r#"" a <b> 'c' ""d\n\"e\"""#,
            ),
            (
                "{% set a = namespace(n=0) %}{% for m in messages %}{% set a.n = 2 %}{% endfor %}{{ a.n }}",
                "2",
            ),
            (
                "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
                "user",
            ),
            ("{% if tools is defined %}tools{% endif %}{% if not tools %}none{% endif %}", "none"),
            ("{% if add_generation_prompt %}{{ 'go' }}{% endif %}", "go"),
            ("{{ messages[1].content.split('\\n')[0] + messages[0].role.upper() }}", "dUSER"),
        ] {
            assert_eq!(render(source, &two).unwrap(), expected, "{source}");
        }
    }

    #[test]
    fn a_users_turn_is_what_stands_around_the_first_message() {
        let chat =
            "{{ bos_token }}{% for m in messages %}<{{ m.role }}>\n{{ m.content | trim }}</>{% endfor %}";
        assert_eq!(template(chat).unwrap().user_turn().unwrap(), ("<s><user>\n".into(), "</>".into()));
        let error = template("{{ messages | length }}").unwrap().user_turn().unwrap_err().to_string();
        assert!(error.contains("chat template") && error.contains("as it is"), "{error}");
    }

    /// Templates that mark what to train on were once no Jinja.
    #[test]
    fn generation_tags_change_no_text() {
        let source =
            "{% for m in messages %}\n{%- generation -%}\n {{ m.content }}{% endgeneration %}\n.{% endfor %}";
        assert_eq!(render(source, &[Message::user("a"), Message::user("b")]).unwrap(), "a.b.");
        assert_eq!(without_generation_tags("{% set generation = 1 %}"), "{% set generation = 1 %}");
    }

    #[test]
    fn a_template_can_refuse_messages() {
        let source = "{% if messages[0].role != 'system' %}\
            {{ raise_exception('a system message must come first') }}{% endif %}";
        let message = render(source, &[Message::user("hi")]).unwrap_err();
        assert!(matches!(message, Error::Request { what: "messages", .. }), "{message:?}");
        assert!(message.to_string().contains("a system message must come first"), "{message}");
    }

    #[test]
    fn a_broken_template_is_an_error_that_names_the_file() {
        for source in ["{% if %}", "{{ messages | no_such_filter }}", "{{ 1 + messages }}"] {
            let message = render(source, &[]).err().map(|e| e.to_string()).unwrap_or_default();
            assert!(message.contains("tokenizer_config.json"), "{source}: {message}");
        }
    }

    #[test]
    fn templates_are_told_whether_to_think_only_if_somebody_says_so() {
        let dir = tempfile::tempdir().unwrap();
        let source = "{{ enable_thinking is defined }} {{ enable_thinking }}";
        std::fs::write(dir.path().join("chat_template.jinja"), source).unwrap();
        let open = || ChatTemplate::open(dir.path()).unwrap().unwrap();
        assert_eq!(open().render(&[], true).unwrap(), "False ");
        assert_eq!(open().thinking(false).render(&[], true).unwrap(), "True False");
    }

    #[test]
    fn where_a_template_is_looked_for() {
        let dir = tempfile::tempdir().unwrap();
        let rendered = || ChatTemplate::open(dir.path()).unwrap().map(|t| t.render(&[], false).unwrap());
        assert_eq!(rendered(), None);
        let config = |text: &str| std::fs::write(dir.path().join("tokenizer_config.json"), text).unwrap();
        config(r#"{"eos_token": "<e>"}"#);
        assert_eq!(rendered(), None);
        config(
            r#"{"chat_template": "one{{ eos_token }}", "eos_token": {"content": "<e>", "lstrip": false}}"#,
        );
        assert_eq!(rendered().as_deref(), Some("one<e>"));
        config(
            r#"{"chat_template": [{"name": "a", "template": "t"}, {"name": "default", "template": "two"}]}"#,
        );
        assert_eq!(rendered().as_deref(), Some("two"));
        std::fs::write(dir.path().join("chat_template.jinja"), "three").unwrap();
        assert_eq!(rendered().as_deref(), Some("three"));
    }

    #[test]
    fn today_is_a_date() {
        let text = render("{{ strftime_now('%d %b %Y') }}", &[]).unwrap();
        assert_eq!(text.split(' ').count(), 3, "{text}");
        assert!(render("{{ strftime_now('%Q') }}", &[]).unwrap_err().to_string().contains("%Q"));
    }
}
