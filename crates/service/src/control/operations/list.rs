//! The list, in pages.

use std::collections::BTreeSet;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use redeliver_proto::page::fitting;
use redeliver_proto::v1;
use redeliver_runtime::config::{Area, Verb};

use super::{ControlError, ControlField, ControlName, Controls, invalid};
use crate::identity::Identity;

/// A page of a list.
#[derive(Debug, PartialEq)]
pub struct ControlPage {
    /// By name.
    pub controls: Vec<v1::Control>,
    /// Empty on the last page.
    pub next_page_token: String,
}

impl Controls {
    /// A page of the controls of the wanted kinds that were changed or that the settings restrict, by name.
    /// `page_token`: that of the previous page, or empty.
    ///
    /// # Errors
    /// When the caller may see nothing, or the token is not one of this list.
    pub fn list(
        &self,
        caller: &Identity,
        is_wanted: impl Fn(&ControlName) -> bool,
        page_token: &str,
    ) -> Result<ControlPage, ControlError> {
        if !caller.may_some(Area::Control, Verb::Read) {
            self.require(caller, Verb::Read, None, "list_controls")?;
        }
        let after = decode(page_token)?;
        let snapshot = self.snapshot()?;
        let restricted = self.apps.restricted().map(ControlName::application);
        let changed = snapshot.table.entries().map(|(name, _)| name.clone());
        let mut names: BTreeSet<ControlName> = changed.chain(restricted).collect();
        names
            .retain(|name| is_wanted(name) && caller.may(Area::Control, Verb::Read, Some(&name.in_scopes())));
        Ok(page(names, after.as_ref(), |name| self.show(name, &snapshot)))
    }
}

fn page(
    names: BTreeSet<ControlName>,
    after: Option<&ControlName>,
    show: impl Fn(&ControlName) -> v1::Control,
) -> ControlPage {
    let left = names
        .into_iter()
        .filter(|name| after.is_none_or(|after| name > after));
    let (controls, last) = fitting(left.map(|name| (name.clone(), show(&name))), usize::MAX);
    ControlPage {
        controls,
        next_page_token: last.map_or_else(String::new, |name| URL_SAFE_NO_PAD.encode(name.to_string())),
    }
}

/// The name in a token; `None` for an empty token. A forged one only selects another place in the list.
fn decode(token: &str) -> Result<Option<ControlName>, ControlError> {
    if token.is_empty() {
        return Ok(None);
    }
    let name = URL_SAFE_NO_PAD.decode(token).ok();
    let name = name.and_then(|name| String::from_utf8(name).ok()?.parse().ok());
    let unknown = || {
        invalid(
            ControlField::PageToken,
            "is not a token of this list; start again without one",
        )
    };
    name.map(Some).ok_or_else(unknown)
}

#[cfg(test)]
mod tests {
    use redeliver_proto::Message as _;

    use super::*;

    /// The maximum size of a message that clients of gRPC accept by default.
    const ACCEPTED: usize = 4 << 20;

    #[test]
    fn controls_are_listed_in_pages() {
        let names: BTreeSet<ControlName> = (0..5_000)
            .map(|number| ControlName::pipeline(&format!("p{number}")))
            .chain((0..10).map(|number| ControlName::tier(&format!("t{number}"), "30s".parse().unwrap())))
            .collect();
        let show = |name: &ControlName| v1::Control {
            name: name.to_string(),
            reason: "w".repeat(1_000),
            // As large as a release of many partitions.
            problem: "p".repeat(if matches!(name, ControlName::Tier(..)) {
                1 << 20
            } else {
                0
            }),
            ..v1::Control::default()
        };
        let (mut listed, mut token) = (Vec::new(), String::new());
        loop {
            let page = page(names.clone(), decode(&token).unwrap().as_ref(), show);
            let answer = v1::ListControlsResponse {
                controls: page.controls,
                next_page_token: page.next_page_token,
            };
            assert!(answer.encoded_len() < ACCEPTED);
            listed.extend(answer.controls.into_iter().map(|control| control.name));
            token = answer.next_page_token;
            if token.is_empty() {
                break;
            }
        }
        let expected: Vec<String> = names.iter().map(ControlName::to_string).collect();
        assert_eq!(listed, expected);
    }

    #[test]
    fn other_texts_are_no_tokens() {
        assert!(decode("").unwrap().is_none());
        for text in ["app/sms", "AA", "\u{e9}", "bm9uc2Vuc2U"] {
            let ControlError::Invalid { field, .. } = decode(text).unwrap_err() else {
                panic!("{text}");
            };
            assert_eq!(field, ControlField::PageToken);
        }
    }
}
