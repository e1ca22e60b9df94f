//! Groups that need attention in a topic: those that have regressed in it, and new ones.
//!
//! A topic counts for itself, so that a caller that sees only some topics gets the groups that it would get if there were no others.

use redeliver_core::Timestamp;
use rusqlite::{Connection, Row};

use super::sql::sql_limit;
use super::texts::{TextTable, Texts};
use crate::fingerprint::GroupId;
use crate::group_states::{GroupState, GroupStates};
use crate::ledger::State;

/// The maximum number of new groups of a topic that are read, those with the latest first dead letter: a service can fail in as many ways as it
/// likes. Of each topic, so that one does not hide the groups of another.
const MAX_NEW: usize = 100;

/// A group with open dead letters in a topic that needs attention there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TopicGroup {
    pub(crate) id: GroupId,
    pub(crate) topic: String,
    /// `REGRESSED` or `OPEN`.
    pub(crate) state: GroupState,
    /// When the first and the last dead letter in the topic died. If it has regressed, the first one is not before that.
    pub(crate) first: Timestamp,
    pub(crate) last: Timestamp,
    /// The number of open ones in the topic.
    pub(crate) open: u64,
    pub(crate) error_class: String,
    pub(crate) error_code: String,
    pub(crate) template: String,
}

/// What is read of a group in a topic.
struct Counted {
    group_id: i64,
    topic_id: i64,
    first: i64,
    last: i64,
    open: i64,
}

impl Counted {
    fn read(row: &Row<'_>) -> rusqlite::Result<Self> {
        Ok(Self {
            group_id: row.get("group_id")?,
            topic_id: row.get("topic_id")?,
            first: row.get("first")?,
            last: row.get("last")?,
            open: row.get("open")?,
        })
    }
}

const COUNTED: &str = "group_id, topic_id, min(first) AS first, max(last) AS last, \
                       sum(CASE WHEN state = ?1 THEN count ELSE 0 END) AS open";

/// The groups with open dead letters that have regressed, and the newest of those whose first dead letter in a topic died since this time, which
/// are neither resolved nor muted. What died in the future is not new yet.
pub(crate) fn groups_in_need(
    connection: &Connection,
    states: &GroupStates,
    since: Timestamp,
    now: Timestamp,
) -> rusqlite::Result<Vec<TopicGroup>> {
    let open = State::Open as i64;
    let mut found = Vec::new();
    let mut of_group = connection.prepare_cached(&format!(
        "SELECT {COUNTED} FROM group_counts WHERE group_id = ?2 GROUP BY topic_id"
    ))?;
    // Few groups have a decision, so that they are looked up one by one.
    for (id, value) in states.table.documents() {
        let Some(decision) = &value.decision else {
            continue;
        };
        for counted in of_group.query_map((open, id.number()), Counted::read)? {
            let counted = counted?;
            let last = Some(Timestamp::from_millis(counted.last));
            if counted.open > 0 && decision.state(last, now) == GroupState::Regressed {
                let first = counted.first.max(decision.resolved_until().as_millis());
                found.push((GroupState::Regressed, Counted { first, ..counted }));
            }
        }
    }
    // A group that is older in the topic, with other states, takes no place.
    let sql = format!(
        "SELECT {COUNTED} FROM group_counts WHERE (group_id, topic_id) IN \
             (SELECT group_id, topic_id FROM \
                 (SELECT group_id, topic_id, row_number() OVER (PARTITION BY topic_id ORDER BY first DESC) AS place \
                  FROM group_counts AS c WHERE state = ?1 AND first BETWEEN ?2 AND ?3 AND NOT EXISTS \
                      (SELECT 1 FROM group_counts \
                       WHERE group_id = c.group_id AND topic_id = c.topic_id AND first < ?2)) \
              WHERE place <= {}) \
         GROUP BY group_id, topic_id HAVING open > 0",
        sql_limit(MAX_NEW)
    );
    let mut new = connection.prepare_cached(&sql)?;
    let times = (open, since.as_millis(), now.as_millis());
    for counted in new.query_map(times, Counted::read)? {
        let counted = counted?;
        let decision = states.decision(GroupId::from_number(counted.group_id));
        let last = Some(Timestamp::from_millis(counted.last));
        if decision.is_none_or(|decision| decision.state(last, now) == GroupState::Open) {
            found.push((GroupState::Open, counted));
        }
    }
    let mut texts = Texts::new(connection);
    let mut of_group = connection
        .prepare_cached("SELECT error_class_id, error_code_id, template FROM groups WHERE id = ?")?;
    let mut read = |(state, counted): (GroupState, Counted)| {
        let (class, code, template): (i64, i64, String) = of_group.query_row([counted.group_id], |row| {
            Ok((
                row.get("error_class_id")?,
                row.get("error_code_id")?,
                row.get("template")?,
            ))
        })?;
        Ok(TopicGroup {
            id: GroupId::from_number(counted.group_id),
            topic: texts.text(TextTable::Texts, counted.topic_id)?,
            state,
            first: Timestamp::from_millis(counted.first),
            last: Timestamp::from_millis(counted.last),
            open: counted.open.unsigned_abs(),
            error_class: texts.text(TextTable::Texts, class)?,
            error_code: texts.text(TextTable::Texts, code)?,
            template,
        })
    };
    found.into_iter().map(&mut read).collect()
}
