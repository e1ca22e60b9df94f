//! `ListGroups` and `GetGroup`.

use std::collections::BTreeSet;
use std::sync::Arc;

use redeliver_core::Timestamp;
use redeliver_proto::convert::{time_of_record, to_timestamp};
use redeliver_proto::error::{invalid, status};
use redeliver_proto::page::fitting;
use redeliver_proto::v1;
use redeliver_runtime::config::Verb;
use tonic::{Code, Status};

use super::list::page_size;
use super::token::{PageToken, QueryHash, query_hash};
use super::{Api, bounded};
use crate::access::Viewer;
use crate::completeness::MAX_AGE;
use crate::filter::{Comparison, Expr, NumberField, NumberTest, Restriction};
use crate::fingerprint::{self, GroupId, InvalidGroupId};
use crate::group_states::contents::GroupProblem;
use crate::group_states::value::Value;
use crate::group_states::{Decided, GroupState, GroupStates, TOPIC};
use crate::index::{self, Cursor, GroupOrder, GroupPage, GroupQuery, IndexedGroup};

impl Api {
    pub(super) async fn list_of_groups(
        &self,
        viewer: &Viewer,
        request: v1::ListGroupsRequest,
    ) -> Result<v1::ListGroupsResponse, Status> {
        if request.without_dead_letters {
            return self.groups_without_letters(viewer, &request).await;
        }
        let filter = viewer.limit(self.parse_filter(&request.filter)?)?;
        let order = order(&request.order_by)?;
        let wanted = wanted(&request.states)?;
        let size = page_size(request.page_size)?;
        let query = page_query(&request.filter, order, &wanted);
        let after = PageToken::decode(query, &request.page_token)?;
        let completeness = self.completeness();
        let tests_states = filter.written().tests(NumberField::State);
        Self::check_states(tests_states, &completeness)?;
        let now = self.clock.now();
        let problem = self.group_states_problem();
        let states = self.group_states()?;
        let (seen, known) = (viewer.clone(), states.clone());
        let tests_masked = filter.tests_masked();
        let GroupPage { groups, next } = self
            .pool
            .query(move |connection| {
                let (filter, visible) = (filter.resolve(connection)?, seen.topics(connection)?);
                let query = GroupQuery {
                    tests_masked,
                    wanted: &wanted,
                    order,
                    after,
                    limit: size,
                    ..GroupQuery::first(&filter, &known, visible.as_ref(), now)
                };
                index::list_groups(connection, &query)
            })
            .await?;
        // The states were read by the query, which may have waited for its turn.
        let completeness = self.completeness_since(&completeness);
        Self::check_states(tests_states, &completeness)?;
        let are_states_known = completeness.are_states_known();
        let groups = groups
            .into_iter()
            .map(|group| (group.cursor, with_state(group, are_states_known, &states)));
        let (page, end) = fitting(groups, size);
        let next = end.or(next);
        Ok(v1::ListGroupsResponse {
            groups: page,
            next_page_token: next.map_or_else(String::new, |cursor| PageToken::encode(query, cursor)),
            completeness: Some(with_problem(
                self.completeness_message(&completeness, viewer),
                problem,
            )),
        })
    }

    /// Groups that have a value, but no dead letters.
    async fn groups_without_letters(
        &self,
        viewer: &Viewer,
        request: &v1::ListGroupsRequest,
    ) -> Result<v1::ListGroupsResponse, Status> {
        for (field, text) in [("filter", &request.filter), ("order_by", &request.order_by)] {
            if !text.is_empty() {
                let problem = "must be empty with `without_dead_letters`";
                return Err(invalid(field, problem, "WITHOUT_DEAD_LETTERS", []));
            }
        }
        viewer.require_all(Verb::Read)?;
        let wanted = wanted(&request.states)?;
        let size = page_size(request.page_size)?;
        let query = query_hash(&["groups without dead letters", &format!("{wanted:?}")]);
        let after = PageToken::decode(query, &request.page_token)?;
        let completeness = self.completeness();
        let now = self.clock.now();
        let problem = self.group_states_problem();
        let states = self.group_states()?;
        let known = states.clone();
        let with_letters = self
            .pool
            .query(move |connection| {
                index::with_letters(connection, known.table.documents().map(|(id, _)| *id))
            })
            .await?;
        let is_wanted =
            |value: &Value| wanted.is_empty() || wanted.contains(&state_without_letters(value, now));
        let without = states
            .table
            .documents()
            .filter(|(id, value)| !value.says_nothing() && !with_letters.contains(*id) && is_wanted(value));
        let mut without: Vec<(Cursor, GroupId)> = without
            .map(|(id, value)| {
                let cursor = Cursor {
                    dead_at: value.last_time().map_or(i64::MIN, Timestamp::as_millis),
                    id_hash: id.number().cast_unsigned(),
                };
                (cursor, *id)
            })
            .filter(|(cursor, _)| after.is_none_or(|after| *cursor > after))
            .collect();
        without.sort_unstable();
        let next = (without.len() > size).then(|| without[size - 1].0);
        without.truncate(size);
        let groups = without.into_iter().filter_map(|(cursor, id)| {
            let value = states.table.get(&id)?;
            Some((cursor, without_letters(id, value, now)))
        });
        let (page, end) = fitting(groups, size);
        let completeness = self.completeness_since(&completeness);
        Ok(v1::ListGroupsResponse {
            groups: page,
            next_page_token: end
                .or(next)
                .map_or_else(String::new, |cursor| PageToken::encode(query, cursor)),
            completeness: Some(with_problem(
                self.completeness_message(&completeness, viewer),
                problem,
            )),
        })
    }

    pub(super) async fn group(&self, viewer: &Viewer, text: String) -> Result<v1::Group, Status> {
        let id = group_id(&text)?;
        let filter = viewer.limit(in_group(id))?;
        let completeness = self.completeness();
        let now = self.clock.now();
        let problem = self.group_states_problem();
        let states = self.group_states()?;
        let (seen, known) = (viewer.clone(), states.clone());
        let page = self
            .pool
            .query(move |connection| {
                let (filter, visible) = (filter.resolve(connection)?, seen.topics(connection)?);
                let query = GroupQuery::first(&filter, &known, visible.as_ref(), now);
                index::list_groups(connection, &query)
            })
            .await?;
        let completeness = self.completeness_since(&completeness);
        let answer = self.completeness_message(&completeness, viewer);
        match page.groups.into_iter().next() {
            Some(group) => Ok(v1::Group {
                completeness: Some(with_problem(answer, problem)),
                ..with_state(group, completeness.are_states_known(), &states)
            }),
            None => Err(Self::no_group(id, answer.complete)),
        }
    }

    /// The states of groups.
    pub(super) fn group_states(&self) -> Result<Arc<GroupStates>, Status> {
        self.groups.states.state().ok_or_else(|| {
            let text = format!("the topic `{TOPIC}` was not read yet; retry later, or see /readyz");
            status(Code::Unavailable, text, "GROUP_STATES_UNKNOWN", [])
        })
    }

    /// Why the states of groups may be old.
    fn group_states_problem(&self) -> Option<Arc<str>> {
        self.groups.states.problem(MAX_AGE)
    }

    /// The error for a group of which the caller sees no dead letters.
    pub(super) fn no_group(id: GroupId, is_complete: bool) -> Status {
        let (code, reason, text) = if is_complete {
            (
                Code::NotFound,
                "GROUP_NOT_FOUND",
                format!("no dead letters of the group `{id}`; retention may have removed them"),
            )
        } else {
            (
                Code::Unavailable,
                "INDEX_INCOMPLETE",
                format!(
                    "the index does not contain all dead letters yet; group `{id}` may exist; retry later"
                ),
            )
        };
        status(code, text, reason, [("id", id.to_string())])
    }
}

/// Identifies a list of groups. Without `wanted` states, its tokens are those of versions that do not know them.
fn page_query(filter: &str, order: GroupOrder, wanted: &[GroupState]) -> QueryHash {
    let (order, states) = (format!("{order:?}"), format!("{wanted:?}"));
    let mut parts = vec!["groups", filter, &order];
    if !wanted.is_empty() {
        parts.push(&states);
    }
    query_hash(&parts)
}

/// The completeness of an answer about groups, whose states may be old for this reason.
fn with_problem(completeness: v1::Completeness, problem: Option<Arc<str>>) -> v1::Completeness {
    v1::Completeness {
        complete: completeness.complete && problem.is_none(),
        group_states_problem: problem.map_or_else(String::new, |problem| bounded(&problem)),
        ..completeness
    }
}

fn state_without_letters(value: &Value, now: Timestamp) -> GroupState {
    let decision = value.decision.as_ref();
    decision
        .map(|decision| decision.state(None, now))
        .unwrap_or_default()
}

/// A group of which there are no dead letters.
pub(super) fn without_letters(id: GroupId, value: &Value, now: Timestamp) -> v1::Group {
    let group = v1::Group {
        id: id.to_string(),
        fingerprint_version: fingerprint::VERSION.into(),
        open: Some(0),
        state: state_without_letters(value, now) as i32,
        ..v1::Group::default()
    };
    with_value(group, Some(value), None)
}

pub(super) fn group_id(text: &str) -> Result<GroupId, Status> {
    text.parse().map_err(|error: InvalidGroupId| {
        invalid("id", format!("`{}` {error}", bounded(text)), "ID_INVALID", [])
    })
}

/// The filter for the dead letters of a group.
pub(super) fn in_group(id: GroupId) -> Expr {
    let is_group = NumberTest::Compare(Comparison::Equal, id.number());
    Expr::Is(Restriction::Number(NumberField::Group, is_group))
}

fn with_state(group: IndexedGroup, are_states_known: bool, states: &GroupStates) -> v1::Group {
    let (value, problem) = (states.table.get(&group.id), states.table.problem(&group.id));
    message(group, are_states_known, value.map(|value| &**value), problem)
}

pub(super) fn message(
    group: IndexedGroup,
    are_states_known: bool,
    value: Option<&Value>,
    problem: Option<GroupProblem>,
) -> v1::Group {
    let topics = group.topics.into_iter();
    let group = v1::Group {
        id: group.id.to_string(),
        fingerprint_version: fingerprint::VERSION.into(),
        pipeline: group.pipeline,
        error_class: group.error_class,
        error_code: group.error_code,
        template: group.template,
        count: group.count,
        open: are_states_known.then_some(group.open),
        first_dead_at: time_of_record(group.first),
        last_dead_at: time_of_record(group.last),
        topics: topics
            .map(|(topic, count)| v1::GroupTopic { topic, count })
            .collect(),
        trend: group.trend,
        sample_id: group.sample.map_or_else(String::new, |id| id.to_string()),
        state: group.state as i32,
        ..v1::Group::default()
    };
    with_value(group, value, problem)
}

/// A group with its state and note.
fn with_value(group: v1::Group, value: Option<&Value>, problem: Option<GroupProblem>) -> v1::Group {
    let decision = value.and_then(|value| value.decision.as_ref());
    let note = value.and_then(|value| value.note.as_ref());
    let muted_until = decision.and_then(|decision| match decision.decided {
        Decided::Muted(until) => until,
        Decided::Open | Decided::Resolved => None,
    });
    v1::Group {
        state_time: decision.map(|decision| to_timestamp(decision.time)),
        state_by: decision.map(|decision| decision.by.clone()).unwrap_or_default(),
        state_reason: decision
            .map(|decision| decision.reason.clone())
            .unwrap_or_default(),
        muted_until: muted_until.map(to_timestamp),
        note: note.map(|note| note.text.clone()).unwrap_or_default(),
        note_time: note.and_then(|note| note.time).map(to_timestamp),
        note_by: note.map(|note| note.by.clone()).unwrap_or_default(),
        revision: value.map_or(0, |value| value.revision),
        problem: problem.map(|problem| problem.to_string()).unwrap_or_default(),
        ..group
    }
}

fn wanted(states: &[i32]) -> Result<Vec<GroupState>, Status> {
    let known = |number: &i32| GroupState::ALL.into_iter().find(|state| *state as i32 == *number);
    let wanted: Option<BTreeSet<GroupState>> = states.iter().map(known).collect();
    let problem = "must be OPEN, RESOLVED, MUTED or REGRESSED; leave it out for groups in any state";
    let wanted = wanted.ok_or_else(|| invalid("states", problem, "STATES_INVALID", []))?;
    Ok(wanted.into_iter().collect())
}

fn order(order_by: &str) -> Result<GroupOrder, Status> {
    let words: Vec<&str> = order_by.split_whitespace().collect();
    match words[..] {
        [] | ["last_dead_at", "desc"] => Ok(GroupOrder::Last),
        ["first_dead_at", "desc"] => Ok(GroupOrder::First),
        ["count", "desc"] => Ok(GroupOrder::Count),
        _ => Err(invalid(
            "order_by",
            "must be `last_dead_at desc`, `first_dead_at desc` or `count desc`",
            "ORDER_INVALID",
            [],
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::group_states::contents::tests::decided;

    #[test]
    fn states_match_the_schema() {
        for state in GroupState::ALL {
            let wire = v1::GroupState::try_from(state as i32).unwrap();
            let name = format!("GROUP_STATE_{}", state.name().to_uppercase());
            assert_eq!(wire.as_str_name(), name);
        }
        assert_eq!(wanted(&[3, 1, 3]).unwrap(), [GroupState::Open, GroupState::Muted]);
        assert!(wanted(&[]).unwrap().is_empty() && wanted(&[0]).is_err() && wanted(&[1, 9]).is_err());
    }

    #[test]
    fn old_group_states_are_incomplete() {
        let complete = v1::Completeness {
            complete: true,
            ..v1::Completeness::default()
        };
        assert_eq!(with_problem(complete.clone(), None), complete);
        let old = with_problem(complete, Some("missing".into()));
        assert_eq!((old.complete, &*old.group_states_problem), (false, "missing"));
    }

    #[test]
    fn group_without_letters_has_state() {
        let now = Timestamp::from_millis(60);
        for (what, state) in [
            (Decided::Resolved, GroupState::Resolved),
            (Decided::Muted(Some(now)), GroupState::Open),
        ] {
            let group = without_letters(GroupId::from_number(1), &decided(what, 50, 4), now);
            assert_eq!((group.state, group.count, group.revision), (state as i32, 0, 4));
            assert_eq!((group.first_dead_at, &*group.state_by), (None, "ann"));
        }
    }

    #[test]
    fn the_order_is_validated() {
        assert_eq!(order("").unwrap(), GroupOrder::Last);
        assert_eq!(order(" count  desc").unwrap(), GroupOrder::Count);
        assert_eq!(order("first_dead_at desc").unwrap(), GroupOrder::First);
        assert!(order("count").is_err() && order("dead_at desc").is_err());
    }

    #[test]
    fn unknown_states_are_not_open() {
        let group = IndexedGroup {
            id: GroupId::from_number(1),
            pipeline: String::new(),
            error_class: String::new(),
            error_code: String::new(),
            template: String::new(),
            count: 3,
            open: 2,
            first: Timestamp::from_millis(1),
            last: Timestamp::from_millis(2),
            topics: [("a-dlq".to_owned(), 3)].into(),
            trend: vec![0; 24],
            sample: None,
            state: GroupState::Open,
            cursor: Cursor {
                dead_at: 0,
                id_hash: 0,
            },
        };
        let known = with_state(group.clone(), true, &GroupStates::default());
        assert_eq!((known.id.as_str(), known.open), ("0000000000000001", Some(2)));
        let unknown = with_state(group, false, &GroupStates::default());
        assert_eq!((unknown.count, unknown.open), (3, None));
    }
}
