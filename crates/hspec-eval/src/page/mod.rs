//! A comparison as one page of HTML that needs nothing else: no script, no file, no network.
//!
//! Colours come from custom properties of the page's style, so that plots follow the reader's light or dark
//! setting.

mod charts;
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
struct Page {
    words: Vec<(&'static str, Vec<String>)>,
    legend: Vec<String>,
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
            legend: self.manifest.rows().into_iter().map(|row| row.name).collect(),
            across: charts::across_contexts(self),
            sections: self.settings.iter().map(section).collect(),
            provenance: self.provenance(),
        };
        let render = || -> Result<String, minijinja::Error> {
            let mut environment = Environment::new();
            environment.add_template(NAME, TEMPLATE)?;
            environment.get_template(NAME)?.render(Serde(&page))
        };
        render().map_err(|e| Error::Undefined { what: format!("page: {e:#}"), why: "its template fails" })
    }
}
