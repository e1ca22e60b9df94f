//! Which problems are sent. No IO.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use redeliver_core::Timestamp;
use redeliver_proto::convert::from_timestamp;
use redeliver_proto::v1;
use redeliver_proto::v1::ProblemKind;
use serde::Serialize;
use sha2::{Digest as _, Sha256};

/// A problem that comes back within this time after it was sent is not sent again.
const SAME: Duration = Duration::from_secs(3_600);
/// A problem that no survey has found for this time was solved.
const GONE: Duration = Duration::from_secs(60);
/// How many problems wait until they are sent. The others follow when there is room.
const MAX_PENDING: usize = 1_000;

/// A problem to send.
#[derive(Debug)]
pub(crate) struct Notice {
    /// The same after a restart if the problem began at the same time.
    pub(crate) id: String,
    pub(crate) body: Vec<u8>,
}

/// What was sent, and what is to be sent.
#[derive(Debug, Default)]
pub(crate) struct Notices {
    seen: HashMap<String, Seen>,
    pending: VecDeque<Notice>,
}

/// A problem that was sent, or is pending.
#[derive(Clone, Copy, Debug)]
struct Seen {
    added: Timestamp,
    last: Timestamp,
    /// Whether it was gone since it was added.
    is_back: bool,
}

#[derive(Serialize)]
struct Event<'p> {
    r#type: String,
    timestamp: String,
    data: Data<'p>,
}

#[derive(Serialize)]
struct Data<'p> {
    #[serde(skip_serializing_if = "str::is_empty")]
    pipeline: &'p str,
    #[serde(skip_serializing_if = "str::is_empty")]
    topic: &'p str,
    #[serde(skip_serializing_if = "str::is_empty")]
    place: &'p str,
    #[serde(skip_serializing_if = "str::is_empty")]
    group_id: &'p str,
    #[serde(skip_serializing_if = "str::is_empty")]
    redrive_id: &'p str,
    #[serde(skip_serializing_if = "str::is_empty")]
    error_class: &'p str,
    #[serde(skip_serializing_if = "str::is_empty")]
    error_code: &'p str,
    #[serde(skip_serializing_if = "Option::is_none")]
    count: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    since: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    deadline: Option<String>,
}

impl Notices {
    /// Adds the problems that are new.
    pub(crate) fn add(&mut self, problems: &[v1::Problem], now: Timestamp, breaker_after: Duration) {
        self.seen.retain(|_, seen| now.since(seen.last) < SAME);
        for problem in problems {
            let since = time(problem.since.as_ref());
            let is_sent = match problem.kind() {
                // What is unknown, and what somebody has done.
                ProblemKind::Unspecified | ProblemKind::Incomplete | ProblemKind::Paused => false,
                ProblemKind::BreakerOpen => since.is_some_and(|since| now.since(since) >= breaker_after),
                _ => true,
            };
            if !is_sent {
                continue;
            }
            let key = key(problem);
            if let Some(seen) = self.seen.get_mut(&key) {
                seen.is_back |= now.since(seen.last) > GONE;
                seen.last = now;
                if !seen.is_back || now.since(seen.added) < SAME {
                    continue;
                }
            }
            if self.pending.len() < MAX_PENDING {
                self.pending.push_back(notice(problem, &key, since, now));
                let seen = Seen {
                    added: now,
                    last: now,
                    is_back: false,
                };
                self.seen.insert(key, seen);
            }
        }
    }

    /// The next one to send.
    pub(crate) fn next(&self) -> Option<&Notice> {
        self.pending.front()
    }

    /// It was sent, or refused.
    pub(crate) fn done(&mut self) {
        self.pending.pop_front();
    }
}

fn time(time: Option<&prost_types::Timestamp>) -> Option<Timestamp> {
    time.and_then(from_timestamp)
}

/// What makes a problem the same as another one.
fn key(problem: &v1::Problem) -> String {
    [
        problem.kind().as_str_name(),
        &problem.pipeline,
        &problem.topic,
        &problem.place,
        &problem.group_id,
        &problem.redrive_id,
    ]
    .join("\0")
}

fn notice(problem: &v1::Problem, key: &str, since: Option<Timestamp>, now: Timestamp) -> Notice {
    let text = |time: Timestamp| time.to_rfc3339();
    let kind = problem.kind().as_str_name().trim_start_matches("PROBLEM_KIND_");
    let event = Event {
        r#type: format!("redeliver.{}", kind.to_lowercase()),
        timestamp: now.to_string(),
        data: Data {
            pipeline: &problem.pipeline,
            topic: &problem.topic,
            place: &problem.place,
            group_id: &problem.group_id,
            redrive_id: &problem.redrive_id,
            error_class: &problem.error_class,
            error_code: &problem.error_code,
            count: problem.count,
            since: since.and_then(text),
            deadline: time(problem.deadline.as_ref()).and_then(text),
        },
    };
    let since = since.map_or(0, Timestamp::as_millis);
    let hash = Sha256::digest(format!("{key}\0{since}"));
    Notice {
        id: hash[..16].iter().map(|byte| format!("{byte:02x}")).collect(),
        body: serde_json::to_vec(&event).expect("texts and numbers are JSON"),
    }
}

#[cfg(test)]
mod tests {
    use redeliver_proto::convert::to_timestamp;

    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    fn at(minutes: i64) -> Timestamp {
        Timestamp::from_millis(1_763_722_800_000 + minutes * 60_000)
    }

    fn problem(kind: ProblemKind, group: &str) -> v1::Problem {
        v1::Problem {
            kind: kind.into(),
            pipeline: "docs".to_owned(),
            group_id: group.to_owned(),
            since: Some(to_timestamp(at(0))),
            count: Some(3),
            template: "a secret".to_owned(),
            ..v1::Problem::default()
        }
    }

    /// The bodies of those that are to be sent now.
    fn sent(notices: &mut Notices) -> Vec<String> {
        let mut bodies = Vec::new();
        while let Some(notice) = notices.next() {
            bodies.push(String::from_utf8(notice.body.clone()).unwrap());
            notices.done();
        }
        bodies
    }

    #[test]
    fn problem_is_sent_once() {
        let mut notices = Notices::default();
        let (first, second) = (
            problem(ProblemKind::GroupNew, "a"),
            problem(ProblemKind::GroupNew, "b"),
        );
        notices.add(std::slice::from_ref(&first), at(1), MINUTE);
        assert_eq!(
            sent(&mut notices),
            [
                r#"{"type":"redeliver.group_new","timestamp":"2025-11-21T11:01:00.000Z","data":{"pipeline":"docs","group_id":"a","count":3,"since":"2025-11-21T11:00:00.000Z"}}"#
            ]
        );
        // Also if a survey did not find it.
        notices.add(&[], at(2), MINUTE);
        notices.add(&[first.clone(), second], at(3), MINUTE);
        assert_eq!(sent(&mut notices).len(), 1);
        notices.add(std::slice::from_ref(&first), at(63), MINUTE);
        assert_eq!(sent(&mut notices).len(), 1);
    }

    #[test]
    fn second_outage_that_lasts_is_sent() {
        let mut notices = Notices::default();
        let open = [problem(ProblemKind::BreakerOpen, "")];
        // Open for 10 minutes, closed for 40, and then open for long.
        for minute in (10..20).chain(60..200) {
            notices.add(&open, at(minute), 5 * MINUTE);
        }
        assert_eq!(sent(&mut notices).len(), 2);
    }

    #[test]
    fn short_outages_are_not_sent() {
        let mut notices = Notices::default();
        let open = [problem(ProblemKind::BreakerOpen, "")];
        notices.add(&open, at(4), 5 * MINUTE);
        assert!(notices.next().is_none());
        notices.add(&open, at(5), 5 * MINUTE);
        assert_eq!(sent(&mut notices).len(), 1);
        let others = [ProblemKind::Paused, ProblemKind::Incomplete].map(|kind| problem(kind, ""));
        notices.add(&others, at(5), MINUTE);
        assert!(notices.next().is_none());
    }

    #[test]
    fn nothing_is_lost_in_a_flood() {
        let mut notices = Notices::default();
        let groups = (0..MAX_PENDING + 10).map(|group| problem(ProblemKind::GroupNew, &group.to_string()));
        let groups: Vec<_> = groups.collect();
        notices.add(&groups, at(0), MINUTE);
        let first = notices.next().unwrap().id.clone();
        for minute in 0..90 {
            notices.add(&groups, at(minute), MINUTE);
        }
        assert_eq!(sent(&mut notices).len(), MAX_PENDING);
        notices.add(&groups, at(90), MINUTE);
        assert_eq!(sent(&mut notices).len(), 10);
        // After a restart, they have the same ids.
        let mut restarted = Notices::default();
        restarted.add(&groups, at(91), MINUTE);
        assert_eq!(restarted.next().unwrap().id, first);
    }
}
