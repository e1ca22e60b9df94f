//! What a caller sees of jobs: those of whose topics it sees all dead letters, without the names of other topics.

use std::collections::BTreeSet;

use redeliver_proto::v1;

use crate::access::Viewer;
use crate::filter::{self, Restriction, TextField, TextTest};
use crate::redrive::job::Job;
use crate::redrive::record::Destinations;

/// Stands for a topic that a caller may not see, and for a text that names one.
pub(crate) const HIDDEN: &str = "<hidden>";

/// Whether a caller sees the topics of all dead letters of a job.
pub(super) fn sees(viewer: &Viewer, job: &Job) -> bool {
    job.spec().sources.iter().all(|count| viewer.sees(&count.topic))
}

/// Whether a caller may know that records are written to this topic: it may have some written there, or sees what becomes of them.
pub(crate) fn sees_destination(viewer: &Viewer, destinations: &Destinations, topic: &str) -> bool {
    viewer.may_write_to(topic)
        || viewer.sees(topic)
        || destinations
            .dead_letter_topics(&[topic])
            .any(|topic| viewer.sees(topic))
}

/// Hides the topics of a job that only others see, who have planned it. How many dead letters it is about stays.
pub(super) fn hide_topics(
    viewer: &Viewer,
    destinations: &Destinations,
    json_fields: &[String],
    job: &mut v1::Redrive,
) {
    if viewer.sees_all() {
        return;
    }
    if !is_filter_visible(viewer, &job.filter, json_fields) {
        HIDDEN.clone_into(&mut job.filter);
    }
    for refused in &mut job.refused {
        let topic = refused.sample.rsplitn(3, '/').nth(2);
        if !topic.is_some_and(|topic| viewer.sees(topic)) {
            HIDDEN.clone_into(&mut refused.sample);
        }
    }
    let counted: Vec<&str> = job.destinations.iter().map(|count| &*count.topic).collect();
    let returning = destinations
        .dead_letter_topics(&counted)
        .filter(|topic| !viewer.sees(topic))
        .map(ToString::to_string);
    let mut hidden: BTreeSet<String> = returning.collect();
    let written = job.destinations.iter_mut().map(|count| &mut count.topic);
    for topic in written.chain([&mut job.destination]) {
        if !topic.is_empty() && !sees_destination(viewer, destinations, topic) {
            hidden.insert(std::mem::replace(topic, HIDDEN.to_owned()));
        }
    }
    for origin in job
        .origins
        .iter_mut()
        .filter(|origin| !viewer.sees(&origin.topic))
    {
        hidden.insert(std::mem::replace(&mut origin.topic, HIDDEN.to_owned()));
    }
    if !hidden.is_empty() && !job.problem.is_empty() {
        // It may name any topic of the pipelines that read the destinations.
        HIDDEN.clone_into(&mut job.problem);
    }
    let texts = [&mut job.auto_pause_reason, &mut job.filter, &mut job.reason];
    for text in job.warnings.iter_mut().chain(texts) {
        hide_in(text, &hidden);
    }
}

/// Replaces quoted topics, or the whole text if it names one in another way.
fn hide_in(text: &mut String, hidden: &BTreeSet<String>) {
    for topic in hidden {
        *text = text.replace(&format!("`{topic}`"), &format!("`{HIDDEN}`"));
    }
    if hidden.iter().any(|topic| text.contains(topic)) {
        HIDDEN.clone_into(text);
    }
}

/// Whether a caller sees all topics that a recorded filter names, also in part.
fn is_filter_visible(viewer: &Viewer, recorded: &str, json_fields: &[String]) -> bool {
    let is_visible = |restriction: &Restriction| match restriction {
        Restriction::Id(id) => viewer.sees(&id.topic),
        Restriction::Text(TextField::Topic | TextField::OriginTopic, test) => match test {
            TextTest::Equal(topic) | TextTest::Has(topic) => viewer.sees(topic),
            TextTest::Present => true,
        },
        _ => true,
    };
    // One that this version, or this configuration, does not understand could name any topic.
    filter::parse_recorded(recorded, json_fields).is_ok_and(|filter| filter.all(&is_visible))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_shows_no_hidden_topic() {
        let hidden: BTreeSet<String> = ["pay".to_owned(), "payments".to_owned()].into();
        for (text, expected) in [
            ("", ""),
            ("3 have come back", "3 have come back"),
            (
                "the destination `payments` does not exist",
                "the destination `<hidden>` does not exist",
            ),
            ("writing payments/0: timed out", HIDDEN),
        ] {
            let mut text = text.to_owned();
            hide_in(&mut text, &hidden);
            assert_eq!(text, expected);
        }
    }
}
