//! What a viewer may do in a service, and what changes need.
//!
//! A page asks the service with the token of its own request and keeps nothing, so it shows what applies now: after a renewal, a sign-out, or a change of
//! the scopes. The service decides about each change in any case.

use redeliver_client::ClientError;
use redeliver_client::messages::GetAccessResponse;
use redeliver_runtime::config::{Area, Scope, Verb};

use crate::page::Button;

/// How many scopes a sentence names.
const NAMED: usize = 3;

/// What a viewer may do in one service. `None`: it is not known, so nothing is hidden.
#[derive(Debug, Default)]
pub(crate) struct Access(Option<Vec<Scope>>);

impl Access {
    pub(crate) fn of(answer: Result<GetAccessResponse, ClientError>) -> Self {
        Self(match answer {
            // A newer service can have scopes that no form of this console needs.
            Ok(access) => Some(
                access
                    .scopes
                    .iter()
                    .filter_map(|scope| scope.parse().ok())
                    .collect(),
            ),
            // An older service does not tell it. With a token that is refused, the page says so.
            Err(_) => None,
        })
    }

    pub(crate) fn permits(&self, need: &Need) -> bool {
        let Some(scopes) = &self.0 else { return true };
        scopes.iter().any(|scope| need.is_met(scope))
    }

    /// What a viewer who cannot make a change is told; `None` if the viewer can.
    pub(crate) fn missing(&self, needs: &[Need]) -> Option<String> {
        let scopes = self.lacking(needs)?;
        Some(format!("You can view; changing needs {scopes}."))
    }

    /// The buttons of what the viewer can do, and what the others need.
    pub(crate) fn actions(&self, buttons: Vec<Button>) -> Actions {
        let is_permitted = |button: &Button| button.needs.iter().all(|need| self.permits(need));
        let (buttons, hidden): (Vec<_>, Vec<_>) = buttons.into_iter().partition(is_permitted);
        let missing = if buttons.is_empty() {
            self.missing(&needs_of(&hidden))
        } else {
            self.lacking(&needs_of(&hidden)).map(|scopes| {
                let labels: Vec<&str> = hidden.iter().map(|button| button.label.as_str()).collect();
                format!("Not shown, because it needs {scopes}: {}.", labels.join(", "))
            })
        };
        Actions { buttons, missing }
    }

    /// The scopes that the viewer lacks, as in `the scope jobs:write`.
    fn lacking(&self, needs: &[Need]) -> Option<String> {
        let mut scopes = Vec::new();
        for need in needs {
            let scope = need.scope().to_string();
            if !self.permits(need) && !scopes.contains(&scope) {
                scopes.push(scope);
            }
        }
        let more = scopes.len().saturating_sub(NAMED);
        scopes.truncate(NAMED);
        let named = scopes.join(", ");
        match (scopes.len(), more) {
            (0, _) => None,
            (1, _) => Some(format!("the scope {named}")),
            (_, 0) => Some(format!("the scopes {named}")),
            (_, more) => Some(format!("the scopes {named} and {more} more")),
        }
    }
}

fn needs_of(buttons: &[Button]) -> Vec<Need> {
    let needs = buttons.iter().flat_map(|button| &button.needs);
    needs.cloned().collect()
}

/// What a page offers to its viewer.
pub(crate) struct Actions {
    pub(crate) buttons: Vec<Button>,
    /// What the viewer lacks for other buttons.
    pub(crate) missing: Option<String>,
}

/// A permission that a change needs.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Need {
    area: Area,
    verb: Verb,
    /// Of an application, a topic, or what is controlled. `None`: of any one, because the form does not say of which.
    name: Option<String>,
}

impl Need {
    /// To change jobs of an application; of any one if it is empty.
    pub(crate) fn jobs(app: &str) -> Self {
        Self {
            area: Area::Jobs,
            verb: Verb::Write,
            name: Some(app.to_owned()).filter(|app| !app.is_empty()),
        }
    }

    /// To change what has this name, such as `app/sms` or `pipeline/docs`. Scopes name an application without its kind.
    pub(crate) fn control(name: &str) -> Self {
        Self {
            area: Area::Control,
            verb: Verb::Write,
            name: Some(name.strip_prefix("app/").unwrap_or(name).to_owned()),
        }
    }

    /// To do this with dead letters of a topic.
    pub(crate) fn dead_letters(verb: Verb, topic: &str) -> Self {
        Self {
            area: Area::DeadLetters,
            verb,
            name: Some(topic.to_owned()),
        }
    }

    /// To redrive, discard and restore dead letters of these topics; of any one if there are none.
    pub(crate) fn operate<'t>(topics: impl IntoIterator<Item = &'t str>) -> Vec<Self> {
        let of_topics = topics
            .into_iter()
            .map(|topic| Self::dead_letters(Verb::Operate, topic));
        let mut needs: Vec<Self> = of_topics.collect();
        if needs.is_empty() {
            needs.push(Self {
                area: Area::DeadLetters,
                verb: Verb::Operate,
                name: None,
            });
        }
        needs
    }

    fn is_met(&self, scope: &Scope) -> bool {
        match &self.name {
            None => scope.is_about(self.area, self.verb),
            name => scope.permits(self.area, self.verb, name.as_deref()),
        }
    }

    fn scope(&self) -> Scope {
        Scope::needed(self.area, self.verb, self.name.as_deref())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn access(scopes: &[&str]) -> Access {
        let scopes = scopes.iter().map(|scope| (*scope).to_owned()).collect();
        Access::of(Ok(GetAccessResponse {
            scopes,
            ..GetAccessResponse::default()
        }))
    }

    fn shown(access: &Access, buttons: Vec<Button>) -> (Vec<String>, Option<String>) {
        let Actions { buttons, missing } = access.actions(buttons);
        (buttons.into_iter().map(|button| button.label).collect(), missing)
    }

    #[test]
    fn only_permitted_buttons_are_shown() {
        let button = |label: &str, needs| Button::new(label, "/act".to_owned()).needs(needs);
        let buttons = || {
            let topics = ["a-dlq", "b-dlq"];
            let mut edit = Need::operate(topics);
            edit.push(Need::dead_letters(Verb::Edit, "a-dlq"));
            vec![button("Redrive", Need::operate(topics)), button("Edit", edit)]
        };
        let all = || vec!["Redrive".to_owned(), "Edit".to_owned()];
        let (operate, edit) = ("dead-letters:operate:*-dlq", "dead-letters:edit:a-*");
        for (scopes, labels, missing) in [
            (&["*"][..], all(), None),
            // That of a newer service is ignored.
            (&["lake:read", operate, edit], all(), None),
            (
                &[operate],
                vec!["Redrive".to_owned()],
                Some("Not shown, because it needs the scope dead-letters:edit:a-dlq: Edit."),
            ),
            (
                &["dead-letters:read", "dead-letters:operate:a-dlq", edit],
                Vec::new(),
                Some("You can view; changing needs the scope dead-letters:operate:b-dlq."),
            ),
            (
                &[],
                Vec::new(),
                Some(
                    "You can view; changing needs the scopes dead-letters:operate:a-dlq, dead-letters:operate:b-dlq, \
                     dead-letters:edit:a-dlq.",
                ),
            ),
        ] {
            let expected = (labels, missing.map(str::to_owned));
            assert_eq!(shown(&access(scopes), buttons()), expected, "{scopes:?}");
        }
        assert_eq!(shown(&Access::default(), buttons()), (all(), None), "not known");
    }

    #[test]
    fn needs_without_name_match_any() {
        let some = access(&[
            "jobs:write:sms-*",
            "control:write:sms",
            "control:write:tier/docs/*",
        ]);
        for (need, is_met) in [
            (Need::jobs(""), true),
            (Need::jobs("sms-eu"), true),
            (Need::jobs("mail"), false),
            (Need::control("app/sms"), true),
            (Need::control("tier/docs/5s"), true),
            (Need::control("pipeline/docs"), false),
            (Need::operate([]).remove(0), false),
        ] {
            assert_eq!(some.permits(&need), is_met, "{need:?}");
        }
        let many: Vec<String> = (0..5).map(|topic| format!("t{topic}")).collect();
        let missing = access(&[]).missing(&Need::operate(many.iter().map(String::as_str)));
        assert!(missing.unwrap().ends_with("dead-letters:operate:t2 and 2 more."));
    }
}
