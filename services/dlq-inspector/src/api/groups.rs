//! `ListGroups` and `GetGroup`.

use redeliver_proto::convert::to_timestamp;
use redeliver_proto::error::{invalid, status};
use redeliver_proto::v1;
use tonic::{Code, Status};

use super::list::page_size;
use super::token::{PageToken, query_hash};
use super::{Api, bounded, query_failed};
use crate::access::Viewer;
use crate::filter::{Comparison, Expr, NumberField, NumberTest, Restriction};
use crate::fingerprint::{self, GroupId, InvalidGroupId};
use crate::index::{self, GroupOrder, GroupPage, IndexedGroup};

impl Api {
    pub(super) async fn list_of_groups(
        &self,
        viewer: &Viewer,
        request: v1::ListGroupsRequest,
    ) -> Result<v1::ListGroupsResponse, Status> {
        let filter = viewer.limit(self.parse_filter(&request.filter)?)?;
        let order = order(&request.order_by)?;
        let size = page_size(request.page_size)?;
        let query = query_hash(&["groups", &request.filter, &format!("{order:?}")]);
        let after = PageToken::decode(query, &request.page_token)?;
        let completeness = self.completeness();
        let tests_states = filter.written().tests(NumberField::State);
        Self::check_states(tests_states, &completeness)?;
        let now = self.clock.now();
        let GroupPage { groups, next } = self
            .pool
            .query(move |connection| {
                let filter = filter.resolve(connection)?;
                index::list_groups(connection, &filter, order, after, size, now)
            })
            .await
            .map_err(|error| query_failed(&error))?;
        // The states were read by the query, which may have waited for its turn.
        let completeness = self.completeness_since(&completeness);
        Self::check_states(tests_states, &completeness)?;
        let are_states_known = completeness.are_states_known();
        let groups = groups.into_iter().map(|group| message(group, are_states_known));
        Ok(v1::ListGroupsResponse {
            groups: groups.collect(),
            next_page_token: next.map_or_else(String::new, |cursor| PageToken::encode(query, cursor)),
            completeness: Some(self.completeness_message(&completeness, viewer)),
        })
    }

    pub(super) async fn group(&self, viewer: &Viewer, text: String) -> Result<v1::Group, Status> {
        let id: GroupId = text.parse().map_err(|error: InvalidGroupId| {
            invalid("id", format!("`{}` {error}", bounded(&text)), "ID_INVALID", [])
        })?;
        let in_group = NumberTest::Compare(Comparison::Equal, id.number());
        let filter = viewer.limit(Expr::Is(Restriction::Number(NumberField::Group, in_group)))?;
        let completeness = self.completeness();
        let now = self.clock.now();
        let page = self
            .pool
            .query(move |connection| {
                let filter = filter.resolve(connection)?;
                index::list_groups(connection, &filter, GroupOrder::default(), None, 1, now)
            })
            .await
            .map_err(|error| query_failed(&error))?;
        let completeness = self.completeness_since(&completeness);
        let answer = self.completeness_message(&completeness, viewer);
        match page.groups.into_iter().next() {
            Some(group) => Ok(v1::Group {
                completeness: Some(answer),
                ..message(group, completeness.are_states_known())
            }),
            None if answer.complete => Err(status(
                Code::NotFound,
                format!("no dead letters of the group `{id}`; retention may have removed them"),
                "GROUP_NOT_FOUND",
                [("id", id.to_string())],
            )),
            None => Err(status(
                Code::Unavailable,
                format!(
                    "the index does not contain all dead letters yet; group `{id}` may exist; retry later"
                ),
                "INDEX_INCOMPLETE",
                [("id", id.to_string())],
            )),
        }
    }
}

fn message(group: IndexedGroup, are_states_known: bool) -> v1::Group {
    let topics = group.topics.into_iter();
    v1::Group {
        id: group.id.to_string(),
        fingerprint_version: fingerprint::VERSION.into(),
        pipeline: group.pipeline,
        error_class: group.error_class,
        error_code: group.error_code,
        template: group.template,
        count: group.count,
        open: are_states_known.then_some(group.open),
        first_dead_at: Some(to_timestamp(group.first)),
        last_dead_at: Some(to_timestamp(group.last)),
        topics: topics
            .map(|(topic, count)| v1::GroupTopic { topic, count })
            .collect(),
        trend: group.trend,
        sample_id: group.sample.map_or_else(String::new, |id| id.to_string()),
        completeness: None,
    }
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
    use redeliver_core::Timestamp;

    use super::*;

    #[test]
    fn the_order_is_validated() {
        assert_eq!(order("").unwrap(), GroupOrder::Last);
        assert_eq!(order(" count  desc").unwrap(), GroupOrder::Count);
        assert_eq!(order("first_dead_at desc").unwrap(), GroupOrder::First);
        assert!(order("count").is_err() && order("dead_at desc").is_err());
    }

    #[test]
    fn unknown_states_are_not_counted_as_open() {
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
        };
        let known = message(group.clone(), true);
        assert_eq!((known.id.as_str(), known.open), ("0000000000000001", Some(2)));
        let unknown = message(group, false);
        assert_eq!((unknown.count, unknown.open), (3, None));
    }
}
