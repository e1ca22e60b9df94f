//! What a filter needs to know of the texts that the index stores once.

use std::collections::{BTreeSet, HashMap};

use super::{Expr, Restriction, TextField, TextTest};

/// The texts to look up for a filter, before it is translated.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Lookups<'a> {
    /// Texts that a text field is compared with.
    pub texts: BTreeSet<&'a str>,
    /// Messages that the error message is compared with.
    pub messages: BTreeSet<&'a str>,
    /// Texts that the error message may contain.
    pub contained: BTreeSet<&'a str>,
}

impl<'a> Lookups<'a> {
    /// The texts of a filter.
    #[must_use]
    pub fn of(filter: &'a Expr) -> Self {
        let mut lookups = Self::default();
        // The empty text stands for a missing field.
        lookups.texts.insert("");
        lookups.messages.insert("");
        lookups.add(filter);
        lookups
    }

    /// Whether the error message is compared with one of the texts.
    #[must_use]
    pub fn has_messages(&self) -> bool {
        !self.contained.is_empty() || self.messages.iter().any(|text| !text.is_empty())
    }

    fn add(&mut self, filter: &'a Expr) {
        match filter {
            Expr::And(parts) | Expr::Or(parts) => parts.iter().for_each(|part| self.add(part)),
            Expr::Not(inner) => self.add(inner),
            Expr::Is(Restriction::Id(id)) => {
                self.texts.insert(&id.topic);
            }
            Expr::Is(Restriction::Text(TextField::ErrorMessage, TextTest::Equal(text))) => {
                self.messages.insert(text);
            }
            Expr::Is(Restriction::Text(TextField::ErrorMessage, TextTest::Has(text))) => {
                self.contained.insert(text);
            }
            Expr::Is(Restriction::Text(_, TextTest::Equal(text))) => {
                self.texts.insert(text);
            }
            Expr::Is(Restriction::Expiry(_, ages)) => {
                self.texts.extend(ages.keys().map(String::as_str));
            }
            Expr::Is(_) => {}
        }
    }
}

/// The templates of messages whose messages contain a text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MessageMatches {
    /// Templates all of whose messages do.
    pub all: Vec<i64>,
    /// Templates of which some messages may.
    pub some: Vec<i64>,
    /// There are so many templates that only the messages themselves tell.
    pub are_unknown: bool,
}

/// The answers to [`Lookups`]. What is not in the index has no entry.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Dictionary {
    /// The ids of texts.
    pub texts: HashMap<String, i64>,
    /// The template and the parts of messages.
    pub messages: HashMap<String, (i64, Option<String>)>,
    /// The templates whose messages contain a text.
    pub contained: HashMap<String, MessageMatches>,
}

impl Dictionary {
    /// The id of a text.
    #[must_use]
    pub fn text(&self, text: &str) -> Option<i64> {
        self.texts.get(text).copied()
    }

    /// The template and the parts of a message.
    #[must_use]
    pub fn message(&self, message: &str) -> Option<&(i64, Option<String>)> {
        self.messages.get(message)
    }

    /// The templates whose messages contain a text.
    #[must_use]
    pub fn messages_with(&self, needle: &str) -> MessageMatches {
        self.contained.get(needle).cloned().unwrap_or_default()
    }

    /// Whether it depends on the parts of messages if they equal or contain a text.
    #[must_use]
    pub fn depends_on_parts(&self) -> bool {
        let mut messages = self.messages.values();
        messages.any(|(_, parts)| parts.is_some())
            || self
                .contained
                .values()
                .any(|found| found.are_unknown || !found.some.is_empty())
    }
}
