//! A comparison as one page of HTML that needs nothing else: no script, no file, no network.
//!
//! Colours come from custom properties of the page's style, so that plots follow the reader's light or dark
//! setting.

mod charts;
mod headline;
mod words;

pub(crate) use words::words;

use crate::{
    Error, Result,
    comparison::{Results, Setting, tables},
};
use minijinja::{Environment, value::Serde};
use serde::Serialize;

const TEMPLATE: &str = include_str!("page.html.jinja");
const NAME: &str = "page.html";
/// Colours and what drawings are made of, for the page and for drawings by themselves.
const STYLE: &str = include_str!("style.css.jinja");
const STYLE_NAME: &str = "style.css";

/// A plot and what it shows.
#[derive(Serialize)]
struct Figure {
    title: String,
    note: String,
    svg: String,
}

/// All of one setting.
#[derive(Serialize)]
struct Section {
    title: String,
    figures: Vec<Figure>,
    tables: Vec<tables::Table>,
}

/// What the template gets.
#[derive(Serialize)]
struct Page<'a> {
    words: Vec<(&'static str, Vec<String>)>,
    legend: Vec<&'a str>,
    across: Vec<Figure>,
    sections: Vec<Section>,
    provenance: Vec<(&'static str, String)>,
}

impl Results {
    /// The page.
    ///
    /// # Errors
    /// [`Error::Undefined`] if the template does not render, which a test rules out for every kind of results.
    pub fn to_html(&self) -> Result<String> {
        let section = |setting: &Setting| Section {
            title: setting.title(),
            figures: charts::of_setting(setting),
            tables: tables::tables(setting),
        };
        let page = Page {
            words: words(self),
            legend: self.settings[0].drafters.iter().map(|row| row.drafter.as_str()).collect(),
            across: charts::across_contexts(self),
            sections: self.settings.iter().map(section).collect(),
            provenance: self.provenance(),
        };
        render(NAME, &page)
    }

    /// How many tokens a pass yields and how far into a block each drafter is right, as one drawing that needs no
    /// page: what a README shows first. It speaks of the first setting.
    ///
    /// # Errors
    /// [`Error::Undefined`] if the style does not render, which a test rules out.
    pub fn to_svg(&self) -> Result<String> {
        Ok(headline::draw(&self.settings[0], &render(STYLE_NAME, ())?))
    }
}

fn render(name: &str, context: impl Serialize) -> Result<String> {
    let render = || -> Result<String, minijinja::Error> {
        let mut environment = Environment::new();
        environment.add_template(STYLE_NAME, STYLE)?;
        environment.add_template(NAME, TEMPLATE)?;
        environment.get_template(name)?.render(Serde(context))
    };
    render().map_err(|e| Error::Undefined { what: format!("{name}: {e:#}"), why: "its template fails" })
}
