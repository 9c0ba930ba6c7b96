//! Long prompts from text that this project writes itself: passages about invented people and places, and a
//! question at the end whose answer stands in two of them.
//!
//! Everything follows from the prompt's number. A longer prompt has more passages of the same making, so that
//! acceptance can be compared across lengths without another kind of text coming in.
//!
//! ```
//! use hspec_eval::synthetic::{Kind, prompt};
//!
//! let text = prompt(Kind::Cite, 3, 8);
//! assert_eq!(text, prompt(Kind::Cite, 3, 8));
//! assert!(text.contains("[8] ") && !text.contains("[9] "));
//! ```

use rand::RngExt;
use rand_chacha::{ChaCha8Rng, rand_core::SeedableRng};

/// What the question asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Passages with numbers; the answer is to name those it rests on.
    Cite,
    /// A running text; the answer is to be short.
    Question,
}

impl Kind {
    /// All of them, with their names in reports.
    pub const ALL: [(&'static str, Self); 2] = [("cite", Self::Cite), ("longqa", Self::Question)];
}

/// The least number of passages: a question is about two.
pub const FEWEST: usize = 3;

const STARTS: [&str; 20] = [
    "Bel", "Dor", "Fen", "Hal", "Kes", "Lor", "Mar", "Nev", "Ost", "Pel", "Quin", "Rav", "Sel", "Tor", "Ulm",
    "Ves", "Wyn", "Yar", "Zel", "Arn",
];
const MIDDLES: [&str; 10] = ["a", "e", "i", "o", "u", "an", "el", "in", "or", "us"];
const PERSONS: [&str; 8] = ["da", "lin", "mir", "na", "ric", "ta", "vin", "wen"];
const PLACES: [&str; 8] = ["bridge", "dale", "field", "ford", "haven", "mere", "stead", "wick"];
const TRADES: [&str; 12] = [
    "baker",
    "bell founder",
    "bookbinder",
    "carpenter",
    "clockmaker",
    "dyer",
    "ferryman",
    "gardener",
    "glassblower",
    "map maker",
    "potter",
    "weaver",
];
const THINGS: [&str; 12] = [
    "a blue lantern",
    "a brass compass",
    "a carved chest",
    "a copper kettle",
    "a green coat",
    "a jar of seeds",
    "a leather map",
    "a pair of scales",
    "a silver whistle",
    "a small harp",
    "a stone lamp",
    "a wooden flute",
];
const FILLERS: [&str; 20] = [
    "The road there follows the river for most of a day and is dry from May to October.",
    "People in the valley say that the winter of that year was long, and that the wells froze twice.",
    "On market days the square fills before sunrise, and by noon hardly a stall has anything left.",
    "The old mill was repaired with oak from the north wood, since nothing else would last in the wet.",
    "Travellers were given soup and a bed, and nobody asked them how long they meant to stay.",
    "A narrow stair leads up to the tower, from which one sees the lake on a clear morning.",
    "Letters took nine days in summer and more than twenty when the pass was closed.",
    "The children learned to count with dried beans, and kept them in a box under the window.",
    "Twice a year the whole street was swept, and the lamps were filled with new oil.",
    "It is told that the first bridge was built of wet timber and leaned a little to the east.",
    "In good years the orchards gave more fruit than the carts could carry to the harbour.",
    "A bell was rung when the ferry left, and again when it came back with the evening post.",
    "The council met in a room without a stove, which kept the meetings short.",
    "Whoever borrowed a tool left a knot of red wool in its place until it was returned.",
    "The fields were laid out in long strips, so that the plough had to turn as seldom as possible.",
    "Rain came from the west on most afternoons, and the roofs were made steep for that reason.",
    "The accounts of those years were kept in a grey book, which is still in the town hall.",
    "Nothing was built higher than the church, except for the crane at the quay.",
    "Bread was sold by weight, and a loaf that was too light went to the school.",
    "In the evening the shutters were closed one after the other, always from the upper end of the lane.",
];

/// What a passage tells of.
struct Fact {
    person: String,
    place: String,
    trade: &'static str,
    thing: &'static str,
    year: u32,
}

/// Prompt number `number` with `passages` of them, at least [`FEWEST`].
pub fn prompt(kind: Kind, number: u64, passages: usize) -> String {
    let passages = passages.max(FEWEST);
    let mut text = match kind {
        Kind::Cite => {
            "Read the numbered passages and answer the question at the end. Name the passages that \
                       your answer rests on by their numbers in square brackets.\n"
        }
        Kind::Question => "Read the text and answer the question at the end in two or three sentences.\n",
    }
    .to_owned();
    for passage in 0..passages {
        text += &match kind {
            Kind::Cite => format!("\n[{}] {}\n", passage + 1, tell(number, passage)),
            Kind::Question => format!("\n{}\n", tell(number, passage)),
        };
    }
    // One from the first half and one from the second, whatever the length.
    let (early, late) = (fact(number, passages / 4), fact(number, passages - 1 - passages / 4));
    text + &format!(
        "\nQuestion: What did {} leave to the town of {}, and in which year did {} the {} come to {}?",
        early.person, early.place, late.person, late.trade, late.place
    )
}

fn tell(number: u64, passage: usize) -> String {
    let Fact { person, place, trade, thing, year } = fact(number, passage);
    let mut rng = random(number, passage, 1);
    let mut filler = || FILLERS[rng.random_range(0..FILLERS.len())];
    format!(
        "{person} was a {trade} who came to {place} in the year {year}. {} {} When {person} grew old, {thing} \
         was left to the town of {place}. {}",
        filler(),
        filler(),
        filler()
    )
}

fn fact(number: u64, passage: usize) -> Fact {
    let mut rng = random(number, passage, 0);
    let mut pick = |list: &[&'static str]| list[rng.random_range(0..list.len())];
    let person = format!("{}{}{}", pick(&STARTS), pick(&MIDDLES), pick(&PERSONS));
    let place = format!("{}{}{}", pick(&STARTS), pick(&MIDDLES), pick(&PLACES));
    let (trade, thing) = (pick(&TRADES), pick(&THINGS));
    Fact { person, place, trade, thing, year: 1600 + rng.random_range(0..300) }
}

/// Random numbers of one passage, whatever else is written.
fn random(number: u64, passage: usize, purpose: u64) -> ChaCha8Rng {
    let mut rng = ChaCha8Rng::seed_from_u64(number);
    rng.set_stream(2 * passage as u64 + purpose);
    rng
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_question_is_about_passages_that_are_there() {
        for (kind, passages) in [(Kind::Cite, 3), (Kind::Question, 4), (Kind::Cite, 41)] {
            let text = prompt(kind, 7, passages);
            let (told, question) = text.split_once("\nQuestion: ").unwrap();
            assert_eq!(told.matches(" was a ").count(), passages);
            let (early, late) = (fact(7, passages / 4), fact(7, passages - 1 - passages / 4));
            assert!(question.contains(&early.person) && question.contains(&late.person), "{question}");
            assert!(told.contains(&format!("{} was left to the town of {}", early.thing, early.place)));
            assert!(told.contains(&format!("came to {} in the year {}", late.place, late.year)));
            assert_ne!(early.person, late.person);
        }
    }

    #[test]
    fn a_longer_prompt_has_the_passages_of_a_shorter_one() {
        let (short, long) = (prompt(Kind::Cite, 2, 5), prompt(Kind::Cite, 2, 9));
        let passages = |text: &str| text.split("\nQuestion: ").next().unwrap().to_owned();
        assert!(passages(&long).starts_with(passages(&short).trim_end()));
        assert_ne!(prompt(Kind::Cite, 1, 5), prompt(Kind::Cite, 2, 5));
        assert_eq!(prompt(Kind::Question, 1, 0), prompt(Kind::Question, 1, FEWEST));
    }
}
