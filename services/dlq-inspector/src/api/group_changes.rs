//! `ResolveGroup`, `MuteGroup`, `ReopenGroup` and `AnnotateGroup`. How a change is written is in [`crate::group_states::change`].

use redeliver_proto::convert::from_timestamp;
use redeliver_proto::error::{invalid, reasons, status};
use redeliver_proto::v1;
use redeliver_runtime::config::Verb;
use tonic::{Code, Status};

use super::Api;
use super::groups::{group_id, in_group, message, without_letters};
use crate::access::Viewer;
use crate::fingerprint::GroupId;
use crate::group_states::Decided;
use crate::group_states::change::{Change, ChangeError, ChangeRequest};
use crate::index::{self, GroupQuery};

/// The maximum size of a reason, in bytes.
const MAX_REASON: usize = 1_000;
/// The maximum size of a note, in bytes.
const MAX_NOTE: usize = 2_000;

impl Api {
    pub(super) async fn mute(
        &self,
        viewer: &Viewer,
        request: v1::MuteGroupRequest,
    ) -> Result<v1::Group, Status> {
        let until = request.until.as_ref().map(|until| {
            let until = from_timestamp(until).filter(|until| *until > self.clock.now());
            let problem = "must be a time in the future; leave it out to mute indefinitely";
            until.ok_or_else(|| invalid("until", problem, "UNTIL_INVALID", []))
        });
        let change = Change::Decide(Decided::Muted(until.transpose()?));
        let request = v1::ChangeGroupRequest {
            id: request.id,
            reason: request.reason,
            expected_revision: request.expected_revision,
        };
        self.change_group(viewer, request, change).await
    }

    pub(super) async fn annotate(
        &self,
        viewer: &Viewer,
        request: v1::AnnotateGroupRequest,
    ) -> Result<v1::Group, Status> {
        check_text("note", &request.note, MAX_NOTE, "NOTE_INVALID")?;
        let change = Change::Annotate(request.note);
        let request = v1::ChangeGroupRequest {
            id: request.id,
            reason: String::new(),
            expected_revision: request.expected_revision,
        };
        self.change_group(viewer, request, change).await
    }

    pub(super) async fn change_group(
        &self,
        viewer: &Viewer,
        request: v1::ChangeGroupRequest,
        change: Change,
    ) -> Result<v1::Group, Status> {
        let requested_at = self.clock.now();
        let id = group_id(&request.id)?;
        check_reason("reason", &request.reason)?;
        let filter = viewer.limit(in_group(id))?;
        let completeness = self.completeness();
        let states = self.group_states()?;
        let (seen, known) = (viewer.clone(), states.clone());
        let (group, topics) = self
            .pool
            .query(move |connection| {
                let (filter, visible) = (filter.resolve(connection)?, seen.topics(connection)?);
                let query = GroupQuery::first(&filter, &known, visible.as_ref(), requested_at);
                let page = index::list_groups(connection, &query)?;
                let topics = index::topics_of_group(connection, id)?;
                Ok((page.groups.into_iter().next(), topics))
            })
            .await?;
        let completeness = self.completeness_since(&completeness);
        let answer = self.completeness_message(&completeness, viewer);
        if group.is_some() {
            viewer.require_operating(topics.keys().map(String::as_str))?;
        } else if topics.is_empty()
            && viewer.sees_all()
            && change.is_reset()
            && states.table.get(&id).is_some()
        {
            // Otherwise, a group that has no dead letters any more would keep its place until it has some again.
            viewer.require_all(Verb::Operate)?;
        } else {
            return Err(Self::no_group(id, answer.complete));
        }
        let changing = self.groups.writer.change(ChangeRequest {
            group: id,
            change,
            by: viewer.name().clone(),
            reason: request.reason,
            expected_revision: request.expected_revision,
            at: requested_at,
            last: topics.values().max().copied(),
            as_of: completeness.as_of,
            audit: self.groups.audit.clone(),
        });
        let changed = changing.await.map_err(|error| change_failed(id, error))?;
        let value = changed.document;
        let Some(mut group) = group else {
            let value = value.unwrap_or_default();
            return Ok(without_letters(id, &value, self.clock.now()));
        };
        let last = topics.iter().filter(|(topic, _)| viewer.sees(topic));
        let last = last.map(|(_, last)| *last).max();
        let decision = value.as_ref().and_then(|value| value.decision.as_ref());
        group.state = decision
            .map(|decision| decision.state(last, self.clock.now()))
            .unwrap_or_default();
        Ok(message(
            group,
            completeness.are_states_known(),
            value.as_deref(),
            None,
        ))
    }
}

/// Checks the reason of a call.
pub(super) fn check_reason(field: &str, reason: &str) -> Result<(), Status> {
    check_text(field, reason, MAX_REASON, "REASON_INVALID")
}

pub(super) fn check_text(field: &str, text: &str, limit: usize, reason: &str) -> Result<(), Status> {
    if text.len() <= limit && !text.contains(|c: char| c.is_control() && c != '\n') {
        return Ok(());
    }
    let problem = format!("must have at most {limit} bytes, without control characters");
    Err(invalid(field, problem, reason, []))
}

fn change_failed(id: GroupId, error: ChangeError) -> Status {
    let (code, reason, text) = match error {
        ChangeError::Revised(revision) => (
            Code::Aborted,
            "GROUP_REVISED",
            format!("group `{id}` has revision {revision}; get it again before you change it"),
        ),
        ChangeError::Unsupported(_) => (
            Code::FailedPrecondition,
            "GROUP_UNKNOWN_FORMAT",
            format!(
                "group `{id}` {error}; change it with the version that wrote it, or see docs/dead-letters.md"
            ),
        ),
        ChangeError::Refused(refused) => (
            Code::ResourceExhausted,
            "TOO_MANY_GROUP_STATES",
            format!(
                "group `{id}` {refused}; reopen groups that no longer matter, and remove their notes: redeliver dlq groups --without-dead-letters lists some"
            ),
        ),
        ChangeError::Unavailable(_) => (Code::Unavailable, "KAFKA_UNAVAILABLE", error.to_string()),
        ChangeError::Unconfirmed(reason) => (
            Code::Unknown,
            reasons::UNCONFIRMED,
            format!(
                "Kafka did not confirm the change, so it may or may not take effect; repeat it with the expected revision ({reason})"
            ),
        ),
    };
    status(code, text, reason, [("id", id.to_string())])
}

#[cfg(test)]
mod tests {
    use redeliver_proto::error::reason;

    use super::*;

    #[test]
    fn unknown_commit_is_unconfirmed() {
        let timed_out = || "timed out".to_owned();
        for (error, code, expected) in [
            (
                ChangeError::Unconfirmed(timed_out()),
                Code::Unknown,
                "UNCONFIRMED",
            ),
            (
                ChangeError::Unavailable(timed_out()),
                Code::Unavailable,
                "KAFKA_UNAVAILABLE",
            ),
        ] {
            let status = change_failed(GroupId::from_number(1), error);
            assert_eq!(
                (status.code(), reason(&status).as_deref()),
                (code, Some(expected))
            );
            assert!(status.message().contains("timed out"), "{status:?}");
        }
    }

    #[test]
    fn control_characters_are_refused() {
        let check = |text: &str| check_text("note", text, 10, "NOTE_INVALID").is_ok();
        assert!(check("") && check("two\nlines") && check("exactly 10"));
        assert!(!check("too long: !") && !check("\u{1b}[31m") && !check("a\r\n"));
    }
}
