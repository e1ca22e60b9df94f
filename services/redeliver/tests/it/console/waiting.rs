//! Single records that wait in a tier: their forms, and what becomes of them.

use redeliver_testkit::eventually;

use super::{Form, SignIn, unescaped};
use crate::retries::drafts;
use crate::support::DEADLINE;

#[test]
fn waiting_records_are_retried_and_edited() {
    let tokens = [
        ("viewer", "dead-letters:read"),
        ("operator", "dead-letters:*, audit:read"),
    ];
    let system = SignIn::start(&tokens, &["dlq_inspector.redrive.edit=true".to_owned()]);
    let (pipe, console) = (&system.pipe, system.address);
    let (_enricher, _tier) = (pipe.enricher("a"), pipe.retry_tier("a"));
    pipe.produce(drafts("busy", 2));
    pipe.until_waiting(2);
    let [viewer, operator] = ["viewer", "operator"].map(|token| system.session(token));
    let shows = |page: &str, text: &str| {
        eventually(page, DEADLINE, || match system.get(&operator, page) {
            answer if answer.status == 200 && answer.body.contains(text) => Ok(answer.body),
            answer => Err(format!("{text:?} is not in {answer:?}")),
        })
    };
    let list = format!("/waiting?scan=records&pipeline={}", pipe.name());
    let forms = |prefix: &str| -> Vec<Form> {
        let body = shows(&list, prefix);
        let links = body.split("href=\"").filter(|link| link.starts_with(prefix));
        let paths = links.map(|link| unescaped(link.split('"').next().unwrap()));
        let form = |path: String| {
            shows(&path, "class=\"act\"");
            Form::open_as(&operator, console, &path)
        };
        paths.map(form).collect()
    };
    // Of each record: retry it, and move it to the dead letters.
    let (mut actions, mut edits) = (forms("/act/waiting?"), forms("/act/edit?"));
    assert_eq!((actions.len(), edits.len()), (4, 2));
    for form in actions.iter().chain(&edits) {
        let shown = system.get(&viewer, &form.path);
        let is_refused = shown.status == 403 && !shown.body.contains("class=\"act\"");
        assert!(is_refused, "{}: {shown:?}", form.path);
    }
    let retry = actions.swap_remove(0);
    edits.retain(|edit| !edit.fields.contains(retry.field("id")));
    shows(&retry.fill("reason", "INC-17").send(), "<td>retried</td>");
    pipe.watch().until_ended(1, DEADLINE);
    let edit = edits.swap_remove(0);
    let unchanged = edit.refused(400);
    assert!(unchanged.contains("Nothing differs"), "{unchanged}");
    shows(&edit.fill("value", "edited").send(), "<td>edited</td>");
    let waiting = pipe.read(&[pipe.first_tier()]);
    let edited = waiting
        .iter()
        .filter(|record| record.value.as_deref() == Some(b"edited"));
    assert_eq!((waiting.len(), edited.count()), (3, 1), "{waiting:?}");
    let entries = shows("/audit?action=waiting.retry", "INC-17");
    assert_eq!(entries.matches("INC-17").count(), 1, "{entries}");
}
