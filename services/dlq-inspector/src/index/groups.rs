//! Answers questions about groups of dead letters with the same [`crate::fingerprint`].

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap, HashSet};
use std::ops::ControlFlow;

use redeliver_core::{Position, Timestamp};
use rusqlite::types::Value;
use rusqlite::{CachedStatement, Connection, OptionalExtension as _, params_from_iter};

use super::group_counts::{End, Member, TREND_HOURS, hour, scan};
use super::message_cache::MessageCache;
use super::query::Cursor;
use super::sql::values;
use super::texts::{TextTable, Texts};
use super::{query, row_key};
use crate::filter::{Comparison, Condition, Expr, NumberField, NumberTest, Restriction, TextField};
use crate::fingerprint::GroupId;
use crate::group_states::{GroupState, GroupStates};
use crate::ledger::State;

/// A group, with counts of those of its dead letters that match a filter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IndexedGroup {
    /// Its id.
    pub id: GroupId,
    /// The pipeline; empty if the headers name none.
    pub pipeline: String,
    /// The error class.
    pub error_class: String,
    /// The error code.
    pub error_code: String,
    /// The template of the messages.
    pub template: String,
    /// The number of dead letters.
    pub count: u64,
    /// The number of open ones.
    pub open: u64,
    /// The time of the first one.
    pub first: Timestamp,
    /// The time of the last one.
    pub last: Timestamp,
    /// The number of dead letters by topic, in the order of names.
    pub topics: BTreeMap<String, u64>,
    /// The number of all dead letters of the group in these topics in each of the last 24 hours, the current one last.
    pub trend: Vec<u64>,
    /// The newest dead letter of the group in the topic with the last one that matches, and not after it.
    pub sample: Option<Position>,
    /// Its state.
    pub state: GroupState,
    /// Its place in the list.
    pub cursor: Cursor,
}

/// Which groups are wanted.
pub(crate) struct GroupQuery<'q> {
    /// Of the dead letters that match.
    pub(crate) filter: &'q Expr,
    /// Whether the filter tests what is masked in groups. Then only the dead letters tell which ones match.
    pub(crate) tests_masked: bool,
    /// The decisions about groups.
    pub(crate) states: &'q GroupStates,
    /// Only groups in one of these states; if empty, in any.
    pub(crate) wanted: &'q [GroupState],
    /// The topics whose dead letters count for the states; `None`: all.
    pub(crate) visible: Option<&'q HashSet<i64>>,
    pub(crate) order: GroupOrder,
    /// The end of the page before.
    pub(crate) after: Option<Cursor>,
    /// The maximum number of groups.
    pub(crate) limit: usize,
    /// The end of the trends.
    pub(crate) now: Timestamp,
}

impl<'q> GroupQuery<'q> {
    /// The group with the last dead letter.
    pub(crate) fn first(
        filter: &'q Expr,
        states: &'q GroupStates,
        visible: Option<&'q HashSet<i64>>,
        now: Timestamp,
    ) -> Self {
        Self {
            filter,
            tests_masked: false,
            states,
            wanted: &[],
            visible,
            order: GroupOrder::default(),
            after: None,
            limit: 1,
            now,
        }
    }

    /// The state of a group, which does not depend on the filter. The last time can be one after all dead letters that are left, if it is only a
    /// bound, see [`end`]: then the group is regressed for longer.
    fn state(&self, connection: &Connection, group_id: i64) -> rusqlite::Result<GroupState> {
        let Some(decision) = self.states.decision(GroupId::from_number(group_id)) else {
            return Ok(GroupState::Open);
        };
        let mut statement =
            connection.prepare_cached("SELECT topic_id, last FROM group_counts WHERE group_id = ?")?;
        let mut rows = statement.query([group_id])?;
        let mut last: Option<i64> = None;
        while let Some(row) = rows.next()? {
            let topic_id: i64 = row.get("topic_id")?;
            if self.visible.is_none_or(|visible| visible.contains(&topic_id)) {
                last = last.max(Some(row.get("last")?));
            }
        }
        Ok(decision.state(last.map(Timestamp::from_millis), self.now))
    }

    /// Whether a group is in a wanted state.
    fn wants(&self, connection: &Connection, group_id: i64) -> rusqlite::Result<bool> {
        Ok(self.wanted.is_empty() || self.wanted.contains(&self.state(connection, group_id)?))
    }

    /// Whether the counts of groups tell which dead letters match.
    fn is_counted(&self) -> bool {
        !self.tests_masked && self.filter.all(&is_counted)
    }

    /// Where the groups are found.
    fn source(&self) -> Source {
        let is_of_one_group = |part: &&Expr| {
            let is_equal = |test: &NumberTest| matches!(test, NumberTest::Compare(Comparison::Equal, _));
            matches!(part, Expr::Is(Restriction::Number(NumberField::Group, test)) if is_equal(test))
        };
        if !self.is_counted() || self.filter.conjuncts().iter().any(is_of_one_group) {
            return Source::All;
        }
        if !self.wanted.is_empty() && !self.wanted.contains(&GroupState::Open) {
            return Source::Decided;
        }
        match self.order {
            GroupOrder::Last => Source::InOrder(TimeColumn {
                name: "last",
                index: "group_counts_by_last",
            }),
            GroupOrder::First => Source::InOrder(TimeColumn {
                name: "first",
                index: "group_counts_by_first",
            }),
            GroupOrder::Count => Source::InOrderOfCount,
        }
    }
}

/// Where the groups of a page are found.
enum Source {
    /// Among all counts, or all dead letters that match.
    All,
    /// Among those with a decision, which are few.
    Decided,
    /// In the order of the list, so that a page reads little more than its own groups.
    InOrder(TimeColumn),
    /// In the order of the numbers of all their dead letters. Those that match are not more.
    InOrderOfCount,
}

/// A column of counts by which groups are listed, with its index.
#[derive(Clone, Copy)]
struct TimeColumn {
    name: &'static str,
    index: &'static str,
}

/// What a list of groups is ordered by, the highest first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GroupOrder {
    /// The time of the last dead letter.
    #[default]
    Last,
    /// The time of the first dead letter.
    First,
    /// The number of dead letters.
    Count,
}

/// A page of groups.
#[derive(Clone, Debug, Default)]
pub struct GroupPage {
    /// The groups.
    pub groups: Vec<IndexedGroup>,
    /// The end of the page, if there are more.
    pub next: Option<Cursor>,
}

/// A count of dead letters that match.
#[derive(Clone, Copy)]
struct Row {
    group_id: i64,
    topic_id: i64,
    state: i64,
    count: i64,
    first: i64,
    last: i64,
    /// The number of all dead letters of the group, if its counts are read, or of those that match.
    total: i64,
}

/// A group while it is counted.
struct Summary {
    group_id: i64,
    /// See [`Row`].
    total: i64,
    count: i64,
    open: i64,
    first: i64,
    last: i64,
    last_topic: i64,
    last_state: i64,
    topics: BTreeMap<i64, i64>,
}

impl Summary {
    /// A group with its first row.
    fn of(row: Row) -> Self {
        let mut summary = Self {
            group_id: row.group_id,
            total: row.total,
            count: 0,
            open: 0,
            first: row.first,
            last: row.last,
            last_topic: row.topic_id,
            last_state: row.state,
            topics: BTreeMap::new(),
        };
        summary.add(row);
        summary
    }

    fn cursor(&self, order: GroupOrder) -> Cursor {
        let value = match order {
            GroupOrder::Last => self.last,
            GroupOrder::First => self.first,
            GroupOrder::Count => self.count,
        };
        Cursor {
            dead_at: value,
            id_hash: self.group_id.cast_unsigned(),
        }
    }

    fn add(&mut self, row: Row) {
        self.count += row.count;
        if row.state == State::Open as i64 {
            self.open += row.count;
        }
        self.first = self.first.min(row.first);
        if row.last >= self.last {
            (self.last, self.last_topic, self.last_state) = (row.last, row.topic_id, row.state);
        }
        *self.topics.entry(row.topic_id).or_default() += row.count;
    }
}

/// A page of groups.
pub(crate) fn list_groups(connection: &Connection, query: &GroupQuery<'_>) -> rusqlite::Result<GroupPage> {
    let mut candidates = Candidates {
        connection,
        query,
        found: Vec::new(),
    };
    match query.source() {
        Source::All => {
            let mut add = |summary| candidates.add(summary).map(|_| ControlFlow::Continue(()));
            all(connection, query, &mut add)?;
        }
        Source::Decided => {
            let mut counts = CountsOfGroup::new(connection, query.filter)?;
            for (id, value) in query.states.table.documents() {
                if value.decision.is_some()
                    && query.wants(connection, id.number())?
                    && let Some(summary) = counts.summary(id.number())?
                {
                    candidates.add(summary)?;
                }
            }
        }
        Source::InOrder(column) => candidates.add_in_order(column)?,
        Source::InOrderOfCount => candidates.add_in_order_of_count()?,
    }
    let Candidates { mut found, .. } = candidates;
    found.sort_unstable_by_key(|(cursor, _)| Reverse(*cursor));
    let has_more = found.len() > query.limit;
    found.truncate(query.limit);
    let next = found.last().filter(|_| has_more).map(|(cursor, _)| *cursor);
    let mut texts = Texts::new(connection);
    let groups = found
        .into_iter()
        .map(|(cursor, found)| load(connection, &mut texts, &found, cursor, query))
        .collect::<rusqlite::Result<_>>()?;
    Ok(GroupPage { groups, next })
}

/// Groups of which the first ones are a page.
struct Candidates<'q> {
    connection: &'q Connection,
    query: &'q GroupQuery<'q>,
    found: Vec<(Cursor, Summary)>,
}

impl Candidates<'_> {
    /// Adds a group, unless it is on an earlier page or in no wanted state. Returns whether it did.
    fn add(&mut self, summary: Summary) -> rusqlite::Result<bool> {
        let (query, limit) = (self.query, self.query.limit);
        let cursor = summary.cursor(query.order);
        let is_after = query.after.is_none_or(|after| cursor < after);
        let is_added = is_after && query.wants(self.connection, summary.group_id)?;
        if is_added {
            self.found.push((cursor, summary));
        }
        // There can be as many groups as dead letters.
        if self.found.len() > 2 * limit + 100 {
            self.found
                .select_nth_unstable_by_key(limit, |(cursor, _)| Reverse(*cursor));
            self.found.truncate(limit + 1);
        }
        Ok(is_added)
    }

    /// Adds the groups with the most dead letters, and one more if there is one.
    fn add_in_order_of_count(&mut self) -> rusqlite::Result<()> {
        let query = self.query;
        // The largest groups found so far, as many as are wanted.
        let mut largest: BinaryHeap<Reverse<Cursor>> = BinaryHeap::new();
        let (sql, params) = by_count(self.connection, query.filter, query.after)?;
        summaries(self.connection, &sql, params, &mut |summary| {
            let cursor = summary.cursor(query.order);
            let at_most = Cursor {
                dead_at: summary.total,
                ..cursor
            };
            let is_enough = largest.len() > query.limit;
            if is_enough && largest.peek().is_some_and(|Reverse(least)| at_most < *least) {
                return Ok(ControlFlow::Break(()));
            }
            if self.add(summary)? {
                largest.push(Reverse(cursor));
                if largest.len() > query.limit + 1 {
                    largest.pop();
                }
            }
            Ok(ControlFlow::Continue(()))
        })
    }

    /// Adds the groups whose time in a column is the highest one on the page or later, and one more if there is one.
    fn add_in_order(&mut self, column: TimeColumn) -> rusqlite::Result<()> {
        let query = self.query;
        let (name, condition) = (column.name, condition(self.connection, query.filter)?);
        let tables = format!("group_counts c INDEXED BY {} CROSS JOIN groups g", column.index);
        let from = counts_from(&tables, &condition);
        let sql = format!(
            "SELECT l.group_id AS group_id, l.{name} AS time {from} AND l.{name} <= ? ORDER BY l.{name} DESC"
        );
        let highest = query.after.map_or(i64::MAX, |after| after.dead_at);
        let params = values(&condition.params).chain([Value::Integer(highest)]);
        let mut statement = self.connection.prepare_cached(&sql)?;
        let mut rows = statement.query(params_from_iter(params))?;
        let mut counts = CountsOfGroup::new(self.connection, query.filter)?;
        // A group has several counts. The time of one of them is that of the group; `None` for groups of which no other count matters.
        let mut times: HashMap<i64, Option<i64>> = HashMap::new();
        let mut last_time = None;
        while let Some(row) = rows.next()? {
            let (group_id, time): (i64, i64) = (row.get("group_id")?, row.get("time")?);
            // Groups with the same time are in the order of their ids, so that a page is complete only with all of them.
            if self.found.len() > query.limit && last_time != Some(time) {
                break;
            }
            last_time = Some(time);
            let (mut summary, known) = (None, times.get(&group_id).copied());
            let of_group = match known {
                Some(of_group) => of_group,
                None if !query.wants(self.connection, group_id)? => None,
                None => {
                    summary = counts.summary(group_id)?;
                    summary
                        .as_ref()
                        .map(|summary| summary.cursor(query.order).dead_at)
                }
            };
            if of_group != Some(time) {
                times.insert(group_id, of_group);
                continue;
            }
            // Other counts with the same time are of a group that is added.
            times.insert(group_id, None);
            if let Some(summary) =
                summary.map_or_else(|| counts.summary(group_id), |found| Ok(Some(found)))?
            {
                self.add(summary)?;
            }
        }
        Ok(())
    }
}

/// Whether the counts of groups tell what a restriction tests.
fn is_counted(restriction: &Restriction) -> bool {
    matches!(
        restriction,
        Restriction::Text(
            TextField::Topic | TextField::Pipeline | TextField::ErrorClass | TextField::ErrorCode,
            _
        ) | Restriction::TopicIn(_)
            | Restriction::Number(NumberField::State | NumberField::Group, _)
    )
}

/// The condition of a filter that is [counted](is_counted).
fn condition(connection: &Connection, filter: &Expr) -> rusqlite::Result<Condition> {
    let dictionary = query::dictionary(connection, filter, &MessageCache::default())?;
    Ok(Condition::of(filter, &dictionary))
}

/// `FROM` and `WHERE` of the counts for which a condition holds.
fn counts_from(tables: &str, condition: &Condition) -> String {
    format!(
        "FROM (SELECT c.group_id, c.topic_id, c.state, c.count, c.first, c.last, g.pipeline_id, g.error_class_id, g.error_code_id, \
         g.count AS total, g.id < 0 AS sign, g.id AS id FROM {tables} ON g.id = c.group_id) l WHERE {}",
        condition.sql
    )
}

/// The counts, and then their groups.
const COUNTS_FIRST: &str = "group_counts c CROSS JOIN groups g";

/// The columns of a [`Row`].
const ROW: &str = "l.group_id AS group_id, l.topic_id AS topic_id, l.state AS state, l.count AS count, l.first AS first, l.last AS last, l.total AS total";

impl Row {
    fn from_row(row: &rusqlite::Row<'_>) -> rusqlite::Result<Self> {
        Ok(Self {
            group_id: row.get("group_id")?,
            topic_id: row.get("topic_id")?,
            state: row.get("state")?,
            count: row.get("count")?,
            first: row.get("first")?,
            last: row.get("last")?,
            total: row.get("total")?,
        })
    }
}

/// Counts of one group after the other.
struct CountsOfGroup<'q> {
    statement: CachedStatement<'q>,
    params: Vec<Value>,
}

impl<'q> CountsOfGroup<'q> {
    /// Of the dead letters that match a filter that is [counted](is_counted).
    fn new(connection: &'q Connection, filter: &Expr) -> rusqlite::Result<Self> {
        let condition = condition(connection, filter)?;
        let sql = format!(
            "SELECT {ROW} {} AND l.group_id = ?",
            counts_from(COUNTS_FIRST, &condition)
        );
        Ok(Self {
            statement: connection.prepare_cached(&sql)?,
            params: values(&condition.params).collect(),
        })
    }

    /// `None` if no dead letter of the group matches.
    fn summary(&mut self, group_id: i64) -> rusqlite::Result<Option<Summary>> {
        let params = self.params.iter().cloned().chain([Value::Integer(group_id)]);
        let mut rows = self.statement.query(params_from_iter(params))?;
        let mut summary: Option<Summary> = None;
        while let Some(row) = rows.next()? {
            let row = Row::from_row(row)?;
            match &mut summary {
                Some(summary) => summary.add(row),
                None => summary = Some(Summary::of(row)),
            }
        }
        Ok(summary)
    }
}

/// What becomes of one group after the other.
type EachGroup<'e> = &'e mut dyn FnMut(Summary) -> rusqlite::Result<ControlFlow<()>>;

/// The counts that match a [counted](is_counted) filter, in the order of the numbers of all dead letters of their groups. `after`: the end of the page before.
pub(super) fn by_count(
    connection: &Connection,
    filter: &Expr,
    after: Option<Cursor>,
) -> rusqlite::Result<(String, Vec<Value>)> {
    // If all dead letters of a group match, or none, groups that are larger are on pages before.
    let is_of_group = |restriction: &Restriction| {
        !matches!(
            restriction,
            Restriction::Text(TextField::Topic, _)
                | Restriction::TopicIn(_)
                | Restriction::Number(NumberField::State, _)
        )
    };
    let most = after
        .filter(|_| filter.all(&is_of_group))
        .map_or(i64::MAX, |after| after.dead_at);
    let condition = condition(connection, filter)?;
    let from = counts_from(
        "groups g INDEXED BY groups_by_count CROSS JOIN group_counts c",
        &condition,
    );
    let sql = format!("SELECT {ROW} {from} AND l.total <= ? ORDER BY l.total DESC, l.sign DESC, l.id DESC");
    let params = values(&condition.params).chain([Value::Integer(most)]);
    Ok((sql, params.collect()))
}

/// All groups with dead letters that match.
fn all(connection: &Connection, query: &GroupQuery<'_>, each: EachGroup<'_>) -> rusqlite::Result<()> {
    let filter = query.filter;
    let (sql, params) = if query.is_counted() {
        let condition = condition(connection, filter)?;
        let sql = format!(
            "SELECT {ROW} {} ORDER BY l.group_id",
            counts_from(COUNTS_FIRST, &condition)
        );
        (sql, values(&condition.params).collect())
    } else {
        let plan = query::plan(connection, filter)?;
        let (from, params) = plan.from();
        let sql = format!(
            "SELECT l.group_id AS group_id, l.topic_id AS topic_id, l.state AS state, count(*) AS count, \
             min(l.dead_at) AS first, max(l.dead_at) AS last, count(*) AS total {from} \
             GROUP BY l.group_id, l.topic_id, l.state ORDER BY l.group_id"
        );
        (sql, params)
    };
    summaries(connection, &sql, params, each)
}

/// Groups from their counts, which come one group after the other.
fn summaries(
    connection: &Connection,
    sql: &str,
    params: Vec<Value>,
    each: EachGroup<'_>,
) -> rusqlite::Result<()> {
    let mut statement = connection.prepare_cached(sql)?;
    let mut rows = statement.query(params_from_iter(params))?;
    let mut current: Option<Summary> = None;
    while let Some(row) = rows.next()? {
        let row = Row::from_row(row)?;
        match &mut current {
            Some(summary) if summary.group_id == row.group_id => summary.add(row),
            _ => {
                if let Some(summary) = current.replace(Summary::of(row))
                    && each(summary)?.is_break()
                {
                    return Ok(());
                }
            }
        }
    }
    current.map_or(Ok(()), |last| each(last).map(|_| ()))
}

fn load(
    connection: &Connection,
    texts: &mut Texts<'_>,
    summary: &Summary,
    cursor: Cursor,
    query: &GroupQuery<'_>,
) -> rusqlite::Result<IndexedGroup> {
    let id = summary.group_id;
    let (pipeline, class, code, template) = connection
        .prepare_cached(
            "SELECT pipeline_id, error_class_id, error_code_id, template FROM groups WHERE id = ?",
        )?
        .query_row([id], |row| {
            Ok((
                row.get("pipeline_id")?,
                row.get("error_class_id")?,
                row.get("error_code_id")?,
                row.get("template")?,
            ))
        })?;
    let mut topics = BTreeMap::new();
    for (topic_id, count) in &summary.topics {
        topics.insert(texts.text(TextTable::Texts, *topic_id)?, count.unsigned_abs());
    }
    Ok(IndexedGroup {
        id: GroupId::from_number(id),
        pipeline: texts.text(TextTable::Texts, pipeline)?,
        error_class: texts.text(TextTable::Texts, class)?,
        error_code: texts.text(TextTable::Texts, code)?,
        template,
        count: summary.count.unsigned_abs(),
        open: summary.open.unsigned_abs(),
        first: Timestamp::from_millis(summary.first),
        last: Timestamp::from_millis(summary.last),
        topics,
        trend: trend(connection, summary, query.now)?,
        sample: sample(connection, texts, summary)?,
        state: query.state(connection, id)?,
        cursor,
    })
}

/// Only of topics with dead letters that match, because the caller may see no other ones.
fn trend(connection: &Connection, summary: &Summary, now: Timestamp) -> rusqlite::Result<Vec<u64>> {
    let hour = hour(now.as_millis());
    let from = hour - TREND_HOURS + 1;
    let mut trend = vec![0; usize::try_from(TREND_HOURS).unwrap_or_default()];
    let mut statement = connection.prepare_cached(
        "SELECT hour, count FROM group_hours WHERE group_id = ? AND topic_id = ? AND hour >= ? AND hour <= ?",
    )?;
    for topic_id in summary.topics.keys() {
        let mut rows = statement.query((summary.group_id, topic_id, from, hour))?;
        while let Some(row) = rows.next()? {
            let index = usize::try_from(row.get::<_, i64>("hour")? - from).unwrap_or_default();
            if let Some(count) = trend.get_mut(index) {
                *count += row.get::<_, i64>("count")?.unsigned_abs();
            }
        }
    }
    Ok(trend)
}

/// The newest dead letter of a group in the topic with the last one that matches, and not after it.
fn sample(
    connection: &Connection,
    texts: &mut Texts<'_>,
    summary: &Summary,
) -> rusqlite::Result<Option<Position>> {
    let topic = texts.text(TextTable::Texts, summary.last_topic)?;
    let position = |partition, offset| Position {
        topic: topic.as_str().into(),
        partition,
        offset,
    };
    // Faster than the full-text index, which reads a page of each term backwards. There is none if the last time is only a bound.
    let last: Option<(i32, i64)> = connection
        .prepare_cached(
            "SELECT partition, offset FROM letters INDEXED BY letters_by_topic_and_state \
             WHERE topic_id = ? AND state = ? AND dead_at = ? AND group_id = ? ORDER BY partition DESC, offset DESC LIMIT 1",
        )?
        .query_row(
            (summary.last_topic, summary.last_state, summary.last, summary.group_id),
            |row| Ok((row.get("partition")?, row.get("offset")?)),
        )
        .optional()?;
    if let Some((partition, offset)) = last {
        return Ok(Some(position(partition, offset)));
    }
    let bucket = |letter: &Member| row_key::bucket(Timestamp::from_millis(letter.dead_at));
    let key = |letter: &Member| (letter.dead_at, letter.partition, letter.offset);
    let of = (summary.group_id, summary.last_topic);
    let mut newest: Option<Member> = None;
    scan(connection, texts, of, End::Last, summary.last, |letter| {
        match &newest {
            Some(newest) if bucket(newest) != bucket(letter) => return ControlFlow::Break(()),
            Some(newest) if key(newest) > key(letter) => {}
            _ => newest = Some(*letter),
        }
        ControlFlow::Continue(())
    })?;
    Ok(newest.map(|newest| position(newest.partition, newest.offset)))
}

/// The number of groups with open dead letters, by state.
pub(crate) fn open_groups(
    connection: &Connection,
    states: &GroupStates,
    now: Timestamp,
) -> rusqlite::Result<BTreeMap<GroupState, i64>> {
    let all: i64 = connection
        .prepare_cached("SELECT count(DISTINCT group_id) AS groups FROM group_counts WHERE state = ?")?
        .query_row([State::Open as i64], |row| row.get("groups"))?;
    let mut counts = BTreeMap::new();
    let mut decided = 0;
    let mut statement = connection.prepare_cached(
        "SELECT max(last) AS last, coalesce(max(state = ?), 0) AS is_open FROM group_counts WHERE group_id = ?",
    )?;
    // Few groups have a decision, so that they are looked up one by one.
    for (id, value) in states.table.documents() {
        let Some(decision) = &value.decision else {
            continue;
        };
        let (last, is_open): (Option<i64>, bool) = statement
            .query_row((State::Open as i64, id.number()), |row| {
                Ok((row.get("last")?, row.get("is_open")?))
            })?;
        if !is_open {
            continue;
        }
        decided += 1;
        let state = decision.state(last.map(Timestamp::from_millis), now);
        *counts.entry(state).or_default() += 1;
    }
    *counts.entry(GroupState::Open).or_default() += all - decided;
    Ok(counts)
}

/// Those of some groups that have dead letters.
pub(crate) fn with_letters(
    connection: &Connection,
    ids: impl Iterator<Item = GroupId>,
) -> rusqlite::Result<HashSet<GroupId>> {
    let mut statement = connection.prepare_cached("SELECT 1 FROM groups WHERE id = ?")?;
    let mut found = HashSet::new();
    for id in ids {
        if statement.exists([id.number()])? {
            found.insert(id);
        }
    }
    Ok(found)
}

/// The topics in which a group has dead letters, with the time of the last one, whatever was done with it.
pub(crate) fn topics_of_group(
    connection: &Connection,
    id: GroupId,
) -> rusqlite::Result<BTreeMap<String, Timestamp>> {
    let mut statement = connection.prepare_cached(
        "SELECT t.text AS topic, max(c.last) AS last FROM group_counts c JOIN texts t ON t.id = c.topic_id \
         WHERE c.group_id = ? GROUP BY c.topic_id",
    )?;
    let rows = statement.query_map([id.number()], |row| {
        Ok((row.get("topic")?, Timestamp::from_millis(row.get("last")?)))
    })?;
    rows.collect()
}
