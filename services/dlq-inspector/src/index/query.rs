//! Queries of the index.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use redeliver_core::{Headers, Position, Timestamp};
use rusqlite::types::Value;
use rusqlite::{Connection, OptionalExtension as _, Row, params, params_from_iter};

use super::entries::{Entries, Place};
use super::message_cache::MessageCache;
use super::plan::{Driver, FEW_OF, Plan, TimeRange};
use super::sql::{trace_text, values};
use super::tables::{BodyRow, LetterRow};
use super::texts::{TextTable, Texts};
use super::{counters, message, row_key, terms};
use crate::dialect::{Dialect, Facts, OriginPosition};
use crate::filter::{
    Comparison, Condition, Dictionary, Expr, Lookups, NumberField, NumberTest, Restriction, TextField,
    TextTest,
};
use crate::fingerprint::GroupId;
use crate::ledger::{LedgerEntry, State};
use crate::letter::{self, ContentHash, MAX_KEY};

/// A dead letter as the index stores it: everything but its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IndexedLetter {
    /// Its position in the dead-letter topic.
    pub id: Position,
    /// The timestamp of its record in the dead-letter topic; up to a second later if millions have nearly the same one, see `row_key`.
    pub dead_at: Timestamp,
    /// When it was indexed, by the clock of this process. A rebuilt index has later times.
    pub indexed_at: Timestamp,
    /// Its state according to the ledger.
    pub state: State,
    /// The entry of the ledger that has set the state; empty if there is none.
    pub entry: LedgerEntry,
    /// What its headers say about the failure.
    pub facts: Facts,
    /// The size of the value in bytes; `None` for a null value.
    pub value_size: Option<u64>,
    /// The hash of the record.
    pub content: ContentHash,
    /// The group of its failure.
    pub group: GroupId,
    /// See [`crate::letter::Letter::key`].
    pub key: Option<Bytes>,
    /// See [`crate::letter::Letter::record_size`].
    pub record_size: u64,
    /// The encoded headers that are indexed, see [`crate::header_list`].
    pub headers: Bytes,
}

/// The order of a list by `dead_at`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Direction {
    /// Newest first.
    #[default]
    Descending,
    /// Oldest first.
    Ascending,
}

/// A point in a list, after which the next page begins. It is the same in every index of the same topics. In a list of groups, it is
/// what the list is ordered by, and the id of the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cursor {
    /// `dead_at` of the last dead letter of a page, in milliseconds.
    pub dead_at: i64,
    /// The hash of its id, which orders dead letters with the same `dead_at`.
    pub id_hash: u64,
}

impl Cursor {
    fn of(dead_at: i64, topic: &str, partition: i32, offset: i64) -> Self {
        let id_hash = terms::stable_hash([topic.as_bytes(), &partition.to_be_bytes(), &offset.to_be_bytes()]);
        Self { dead_at, id_hash }
    }
}

impl IndexedLetter {
    /// The cursor after this dead letter.
    #[must_use]
    pub fn cursor(&self) -> Cursor {
        let Position {
            topic,
            partition,
            offset,
        } = &self.id;
        Cursor::of(self.dead_at.as_millis(), topic, *partition, *offset)
    }

    /// The size of the key in bytes, also of what is not indexed of it. `headers`: those that are indexed; if there are others, a large key seems larger.
    pub(crate) fn key_size(&self, headers: &Headers) -> u64 {
        let indexed = self.indexed_key();
        if indexed <= MAX_KEY as u64 {
            return indexed;
        }
        let others = self.value_size.unwrap_or(0) + letter::headers_size(headers);
        self.record_size.saturating_sub(others).max(indexed)
    }

    /// Whether the index has only a part of the key, or not all headers, so that filters do not find the others. `headers`: those that are indexed.
    pub(crate) fn is_partly_indexed(&self, headers: &Headers) -> bool {
        let indexed = self.indexed_key();
        let known = indexed + self.value_size.unwrap_or(0) + letter::headers_size(headers);
        indexed > MAX_KEY as u64 || self.record_size > known
    }

    fn indexed_key(&self) -> u64 {
        self.key.as_ref().map_or(0, |key| key.len() as u64)
    }

    /// The size of key and headers in bytes, as far as they are indexed.
    pub(crate) fn size(&self) -> usize {
        self.headers.len() + self.key.as_ref().map_or(0, Bytes::len)
    }

    fn load(
        connection: &Connection,
        texts: &mut Texts<'_>,
        entries: &mut Entries<'_>,
        row: i64,
    ) -> rusqlite::Result<Self> {
        let letter = LetterRow::load(connection, row)?;
        let body = BodyRow::load(connection, row)?;
        let place = Place {
            topic_id: letter.topic_id,
            partition: letter.partition,
            offset: letter.offset,
        };
        let entry = entries
            .find(place, &letter.content, letter.dead_at)?
            .unwrap_or_default();
        let time = |millis: Option<i64>| millis.map(Timestamp::from_millis);
        let mut text = |id| texts.text(TextTable::Texts, id);
        Ok(Self {
            id: Position {
                topic: text(letter.topic_id)?.into(),
                partition: letter.partition,
                offset: letter.offset,
            },
            dead_at: Timestamp::from_millis(letter.dead_at),
            indexed_at: Timestamp::from_millis(letter.indexed_at),
            state: State::from_number(letter.state).unwrap_or_default(),
            entry,
            facts: Facts {
                dialect: Dialect::from_number(letter.dialect),
                pipeline: text(letter.pipeline_id)?,
                error_class: text(letter.error_class_id)?,
                error_code: text(letter.error_code_id)?,
                origin: Some(text(letter.origin_topic_id)?)
                    .filter(|topic| !topic.is_empty())
                    .map(|topic| OriginPosition {
                        topic,
                        partition: letter.origin_partition,
                        offset: letter.origin_offset,
                    }),
                error_message: message::join(
                    &texts.text(TextTable::Templates, letter.template_id)?,
                    letter.message_parts.as_deref(),
                ),
                // Only the record tells it.
                error_response: String::new(),
                failed_at: time(letter.failed_at),
                retry_count: letter.retry_count,
                origin_timestamp: time(letter.origin_timestamp),
                job_id: letter.job_id,
                trace_id: letter.trace_id.map(trace_text),
            },
            value_size: letter.value_size.and_then(|size| u64::try_from(size).ok()),
            content: letter.content,
            group: GroupId::from_number(letter.group_id),
            key: body.key.map(Bytes::from),
            record_size: u64::try_from(body.record_size).unwrap_or(u64::MAX),
            headers: body.headers.into(),
        })
    }
}

/// Looks up the texts of a filter.
pub(super) fn dictionary(
    connection: &Connection,
    filter: &Expr,
    messages: &MessageCache,
) -> rusqlite::Result<Dictionary> {
    let lookups = Lookups::of(filter);
    let mut dictionary = Dictionary::default();
    for text in lookups.texts {
        if let Some(id) = TextTable::Texts.find(connection, text)? {
            dictionary.texts.insert(text.to_owned(), id);
        }
    }
    for text in lookups.messages {
        let (template, parts) = message::split(text);
        if let Some(id) = TextTable::Templates.find(connection, &template)? {
            dictionary.messages.insert(text.to_owned(), (id, parts));
        }
    }
    for needle in lookups.contained {
        let matches = messages.matches(connection, needle)?;
        dictionary.contained.insert(needle.to_owned(), matches);
    }
    Ok(dictionary)
}

pub(super) fn plan(connection: &Connection, filter: &Expr) -> rusqlite::Result<Plan> {
    let dictionary = dictionary(connection, filter, &MessageCache::default())?;
    let rows_with = |restriction: &Restriction| {
        let condition = Condition::of(&Expr::Is(restriction.clone()), &dictionary);
        let totals = counters::totals(connection, &condition)?;
        Ok(totals.into_iter().map(|(_, count)| count).sum())
    };
    Plan::of(filter, &dictionary, rows_with, |query, rows| {
        finds_much(connection, query, rows)
    })
}

/// Whether a query of the full-text index finds at least one of [`FEW_OF`] rows, among the newest ones between two numbers of rows.
fn finds_much(connection: &Connection, query: &str, [first, last]: [i64; 2]) -> rusqlite::Result<bool> {
    let sql = "SELECT rowid FROM terms WHERE terms MATCH ? AND rowid >= ? AND rowid <= ? \
               ORDER BY rowid DESC LIMIT 1 OFFSET ?";
    let mut statement = connection.prepare_cached(sql)?;
    let params = (query, first, last, SAMPLED_ROWS - 1);
    let oldest = statement.query_row(params, |row| row.get("rowid"));
    let Some(oldest): Option<i64> = oldest.optional()? else {
        return Ok(false);
    };
    let sql = "SELECT count(*) AS count FROM (SELECT 1 FROM letters NOT INDEXED WHERE row >= ? AND row <= ? LIMIT ?)";
    let mut statement = connection.prepare_cached(sql)?;
    let limit = SAMPLED_ROWS * FEW_OF;
    let newer: i64 = statement.query_row((oldest, last, limit), |row| row.get("count"))?;
    Ok(newer < limit)
}

/// The number of rows of the full-text index that tell how much a query of it finds.
const SAMPLED_ROWS: i64 = 2_000;

/// The topics of all dead letters, with their ids in the index.
pub(crate) fn topics(connection: &Connection) -> rusqlite::Result<Vec<(i64, String)>> {
    let mut texts = Texts::new(connection);
    let ids = counters::topics(connection)?.into_iter();
    ids.map(|id| Ok((id, texts.text(TextTable::Texts, id)?)))
        .collect()
}

/// One page of dead letters.
#[derive(Debug, Default)]
pub(crate) struct Page {
    pub(crate) letters: Vec<IndexedLetter>,
    pub(crate) has_more: bool,
}

/// How much a page may contain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PageLimit {
    pub(crate) letters: usize,
    /// A page ends once its keys and headers exceed this many bytes.
    pub(crate) bytes: usize,
}

impl Page {
    /// Loads these rows, or fewer if they are large.
    fn load(
        connection: &Connection,
        rows: &[i64],
        has_more: bool,
        limit: PageLimit,
    ) -> rusqlite::Result<Self> {
        let mut page = Self::default();
        let mut texts = Texts::new(connection);
        let mut entries = Entries::new(connection)?;
        let mut bytes = 0;
        for row in rows {
            let letter = IndexedLetter::load(connection, &mut texts, &mut entries, *row)?;
            bytes += letter.size();
            page.letters.push(letter);
            if bytes >= limit.bytes {
                break;
            }
        }
        page.has_more = has_more || page.letters.len() < rows.len();
        Ok(page)
    }
}

/// How many rows beyond twice those of a page [`list`] holds before it drops those that are not on the page.
const KEPT_ROWS: usize = 1_000;

/// A row that matches a filter, with its place in a list.
struct Found {
    cursor: Cursor,
    row: i64,
}

/// A page in the order of `dead_at` and the hash of the id, beginning after a cursor.
pub(crate) fn list(
    connection: &Connection,
    filter: &Expr,
    direction: Direction,
    after: Option<Cursor>,
    limit: PageLimit,
) -> rusqlite::Result<Page> {
    let mut plan = plan(connection, filter)?;
    let order = match (direction, after) {
        (Direction::Descending, after) => {
            plan.range
                .limit(i64::MIN, after.map_or(i64::MAX, |after| after.dead_at));
            "DESC"
        }
        (Direction::Ascending, after) => {
            plan.range
                .limit(after.map_or(i64::MIN, |after| after.dead_at), i64::MAX);
            "ASC"
        }
    };
    let is_past = |cursor: &Cursor| {
        after.is_none_or(|after| match direction {
            Direction::Descending => *cursor < after,
            Direction::Ascending => *cursor > after,
        })
    };
    let in_order = |one: &Found, other: &Found| match direction {
        Direction::Descending => other.cursor.cmp(&one.cursor),
        Direction::Ascending => one.cursor.cmp(&other.cursor),
    };
    let (from, params) = plan.from();
    let sql = format!(
        "SELECT l.row AS row, l.dead_at AS dead_at, l.topic_id AS topic_id, l.partition AS partition, \
         l.offset AS offset {from} ORDER BY {} {order}",
        plan.order()
    );
    let mut statement = connection.prepare_cached(&sql)?;
    let mut rows = statement.query(params_from_iter(params))?;
    let mut texts = Texts::new(connection);
    let mut found: Vec<Found> = Vec::new();
    let mut last_bucket = None;
    while let Some(row) = rows.next()? {
        let dead_at: i64 = row.get("dead_at")?;
        // Rows of the same bucket are in no particular order, so that a page is complete only with its last bucket.
        let bucket = Some(row_key::bucket(Timestamp::from_millis(dead_at)));
        if found.len() > limit.letters && bucket != last_bucket {
            break;
        }
        last_bucket = bucket;
        let topic = texts.text(TextTable::Texts, row.get("topic_id")?)?;
        let cursor = Cursor::of(dead_at, &topic, row.get("partition")?, row.get("offset")?);
        if is_past(&cursor) {
            found.push(Found {
                cursor,
                row: row.get("row")?,
            });
        }
        // A bucket can have millions of rows.
        if found.len() > 2 * limit.letters + KEPT_ROWS {
            found.select_nth_unstable_by(limit.letters, in_order);
            found.truncate(limit.letters + 1);
        }
    }
    found.sort_unstable_by(in_order);
    let has_more = found.len() > limit.letters;
    let rows: Vec<i64> = found
        .into_iter()
        .take(limit.letters)
        .map(|found| found.row)
        .collect();
    Page::load(connection, &rows, has_more, limit)
}

/// Maximum number of rows that [`list_unread`] tests, so that a watch of few dead letters does not leave the fast lane of queries.
pub(super) const SCANNED_ROWS: usize = 20_000;

/// Maximum number of partitions that [`list_unread`] reads. Each of them looks up the texts of the filter.
const READ_PARTS: usize = 50;

/// What a watch has not read of a partition: from offset `next` to before `end`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Unread {
    pub(crate) topic: Arc<str>,
    pub(crate) partition: i32,
    pub(crate) next: i64,
    pub(crate) end: i64,
}

/// A page of a watch.
#[derive(Debug, Default)]
pub(crate) struct Stretch {
    pub(crate) letters: Vec<IndexedLetter>,
    /// Of each of the first parts, the offset before which all dead letters were tested.
    pub(crate) next: Vec<i64>,
}

/// The first dead letters that match, in the order of the parts and of offsets.
pub(crate) fn list_unread(
    connection: &Connection,
    filter: &Expr,
    messages: &MessageCache,
    parts: &[Unread],
    limit: PageLimit,
) -> rusqlite::Result<Stretch> {
    let condition = Condition::of(filter, &dictionary(connection, filter, messages)?);
    let bodies = if condition.reads_bodies {
        " CROSS JOIN bodies b ON b.row = l.row"
    } else {
        ""
    };
    let sql = format!(
        "SELECT l.row AS row, l.offset AS offset, {} AS matches FROM letters l INDEXED BY letters_by_position{bodies} \
         WHERE l.topic_id = ? AND l.partition = ? AND l.offset >= ? AND l.offset < ? ORDER BY l.offset",
        condition.sql
    );
    let mut statement = connection.prepare_cached(&sql)?;
    let (mut texts, mut entries) = (Texts::new(connection), Entries::new(connection)?);
    let (mut stretch, mut tested, mut bytes) = (Stretch::default(), 0, 0);
    for part in parts.iter().take(READ_PARTS) {
        let topic_id = TextTable::Texts.find(connection, &part.topic)?;
        let place = [topic_id.unwrap_or(-1), part.partition.into(), part.next, part.end];
        let params = values(&condition.params).chain(place.map(Value::Integer));
        let mut rows = statement.query(params_from_iter(params))?;
        while let Some(row) = rows.next()? {
            tested += 1;
            if row.get("matches")? {
                let letter = IndexedLetter::load(connection, &mut texts, &mut entries, row.get("row")?)?;
                bytes += letter.size();
                stretch.letters.push(letter);
            }
            if tested == SCANNED_ROWS || stretch.letters.len() == limit.letters || bytes >= limit.bytes {
                let offset: i64 = row.get("offset")?;
                stretch.next.push(offset + 1);
                return Ok(stretch);
            }
        }
        stretch.next.push(part.end);
    }
    Ok(stretch)
}

/// The dead letter with this id.
pub(crate) fn get(connection: &Connection, id: &Position) -> rusqlite::Result<Option<IndexedLetter>> {
    let Some(topic_id) = TextTable::Texts.find(connection, &id.topic)? else {
        return Ok(None);
    };
    let row = connection
        .prepare_cached("SELECT row FROM letters WHERE topic_id = ? AND partition = ? AND offset = ?")?
        .query_row((topic_id, id.partition, id.offset), |row| row.get("row"))
        .optional()?;
    let mut entries = Entries::new(connection)?;
    row.map(|row| IndexedLetter::load(connection, &mut Texts::new(connection), &mut entries, row))
        .transpose()
}

/// Counts of the dead letters of one topic.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TopicCounts {
    /// Open dead letters.
    pub open: u64,
    /// All dead letters.
    pub total: u64,
    /// All dead letters since each of the three requested times.
    pub since: [u64; 3],
    /// `dead_at` of the oldest open dead letter.
    pub oldest: Option<Timestamp>,
    /// `dead_at` of the newest open dead letter.
    pub newest: Option<Timestamp>,
    /// Open dead letters by error class.
    pub open_by_class: BTreeMap<String, u64>,
}

const OPEN: i64 = State::Open as i64;

impl TopicCounts {
    fn add(&mut self, error_class: String, state: i64, count: u64) {
        self.total += count;
        if state == OPEN {
            self.open += count;
            *self.open_by_class.entry(error_class).or_default() += count;
        }
    }

    fn add_open(&mut self, oldest: i64, newest: i64) {
        let [oldest, newest] = [oldest, newest].map(Timestamp::from_millis);
        self.oldest = Some(self.oldest.map_or(oldest, |known| known.min(oldest)));
        self.newest = self.newest.max(Some(newest));
    }
}

/// Counts of the dead letters that match, by topic.
pub(crate) fn count_by_topic(
    connection: &Connection,
    filter: &Expr,
    since: [Timestamp; 3],
) -> rusqlite::Result<BTreeMap<String, TopicCounts>> {
    let is_counted = |restriction: &Restriction| {
        matches!(
            restriction,
            Restriction::Text(TextField::Topic | TextField::ErrorClass, _)
                | Restriction::TopicIn(_)
                | Restriction::Number(NumberField::State, _)
        )
    };
    if filter.all(&is_counted) {
        counts_of_writer(connection, filter, since)
    } else {
        counts_of_rows(connection, filter, since)
    }
}

/// From the counters of the writer, which know topic, error class and state.
fn counts_of_writer(
    connection: &Connection,
    filter: &Expr,
    since: [Timestamp; 3],
) -> rusqlite::Result<BTreeMap<String, TopicCounts>> {
    let mut dictionary = dictionary(connection, filter, &MessageCache::default())?;
    let condition = Condition::of(filter, &dictionary);
    let mut texts = Texts::new(connection);
    let mut topics: BTreeMap<i64, TopicCounts> = BTreeMap::new();
    for (counted, count) in counters::totals(connection, &condition)? {
        let class = texts.text(TextTable::Texts, counted.error_class_id)?;
        let topic = topics.entry(counted.topic_id).or_default();
        topic.add(class, counted.state, count.unsigned_abs());
    }
    let all = counters::totals(connection, &Condition::of(&Expr::And(Vec::new()), &dictionary))?;
    for (index, time) in since.into_iter().enumerate() {
        for (topic, count) in counters::since(connection, &condition, time)? {
            topics.entry(topic).or_default().since[index] = count.unsigned_abs();
        }
    }
    for (topic_id, counts) in topics.iter_mut().filter(|(_, counts)| counts.open > 0) {
        let topic = texts.text(TextTable::Texts, *topic_id)?;
        let mut of_topic = Vec::new();
        for (counted, count) in all.iter().filter(|(counted, _)| counted.topic_id == *topic_id) {
            let class = texts.text(TextTable::Texts, counted.error_class_id)?;
            of_topic.push((class, counted.state, count.unsigned_abs()));
        }
        dictionary.texts.insert(topic.clone(), *topic_id);
        let is_topic = Expr::Is(Restriction::Text(TextField::Topic, TextTest::Equal(topic)));
        let is_open = Expr::Is(Restriction::Number(
            NumberField::State,
            NumberTest::Compare(Comparison::Equal, OPEN),
        ));
        let plan = Plan {
            driver: driver_of_open(&is_topic, counts, &of_topic, &dictionary),
            range: TimeRange::ALL,
            condition: Condition::of(&Expr::And(vec![is_topic, is_open, filter.clone()]), &dictionary),
        };
        let first = |direction| first_time(connection, &plan, direction);
        if let (Some(oldest), Some(newest)) = (first(Direction::Ascending)?, first(Direction::Descending)?) {
            counts.add_open(oldest, newest);
        }
    }
    let named = topics
        .into_iter()
        .map(|(id, counts)| Ok((texts.text(TextTable::Texts, id)?, counts)));
    named.collect()
}

/// What finds the open dead letters of a topic that are counted: all open ones are read until one matches, or those of the counted classes in any
/// state, if they are fewer. `of_topic`: all dead letters of the topic by class and state.
fn driver_of_open(
    is_topic: &Expr,
    counts: &TopicCounts,
    of_topic: &[(String, i64, u64)],
    dictionary: &Dictionary,
) -> Driver {
    let open = of_topic.iter().filter(|(_, state, _)| *state == OPEN);
    let open: u64 = open.map(|(.., count)| count).sum();
    let is_counted = |class: &String| counts.open_by_class.contains_key(class);
    let of_classes = of_topic.iter().filter(|(class, ..)| is_counted(class));
    let of_classes: u64 = of_classes.map(|(.., count)| count).sum();
    if counts.open == open || of_classes >= open {
        return Driver::TopicAndState;
    }
    let classes = counts.open_by_class.keys().cloned();
    let is_class = |class| Expr::Is(Restriction::Text(TextField::ErrorClass, TextTest::Equal(class)));
    let any_class = Expr::Or(classes.map(is_class).collect());
    // Without a term for each class, the index would find all of the topic.
    let has_terms = terms::query(&any_class, dictionary).is_some();
    let both = Expr::And(vec![is_topic.clone(), any_class]);
    let found = terms::query(&both, dictionary).filter(|_| has_terms);
    found.map_or(Driver::TopicAndState, Driver::Terms)
}

/// `dead_at` of the first row of a plan.
fn first_time(connection: &Connection, plan: &Plan, direction: Direction) -> rusqlite::Result<Option<i64>> {
    let (from, params) = plan.from();
    let order = match direction {
        Direction::Ascending => "ASC",
        Direction::Descending => "DESC",
    };
    let sql = format!(
        "SELECT l.dead_at AS dead_at {from} ORDER BY {} {order}",
        plan.order()
    );
    let mut statement = connection.prepare_cached(&sql)?;
    let mut rows = statement.query(params_from_iter(params))?;
    let bucket = |time| row_key::bucket(Timestamp::from_millis(time));
    let Some(row) = rows.next()? else {
        return Ok(None);
    };
    let mut first: i64 = row.get("dead_at")?;
    // With the full-text index, rows of the same bucket are in no particular order.
    while matches!(plan.driver, Driver::Terms(_))
        && let Some(row) = rows.next()?
    {
        let time: i64 = row.get("dead_at")?;
        if bucket(first) != bucket(time) {
            break;
        }
        first = match direction {
            Direction::Ascending => first.min(time),
            Direction::Descending => first.max(time),
        };
    }
    Ok(Some(first))
}

/// By reading the rows.
fn counts_of_rows(
    connection: &Connection,
    filter: &Expr,
    since: [Timestamp; 3],
) -> rusqlite::Result<BTreeMap<String, TopicCounts>> {
    let plan = plan(connection, filter)?;
    let (from, params) = plan.from();
    let sql = format!(
        "SELECT l.topic_id AS topic_id, l.error_class_id AS error_class_id, l.state AS state, count(*) AS total, \
         sum(l.dead_at >= ?) AS since_0, sum(l.dead_at >= ?) AS since_1, sum(l.dead_at >= ?) AS since_2, \
         min(l.dead_at) AS oldest, max(l.dead_at) AS newest \
         {from} GROUP BY l.topic_id, l.error_class_id, l.state"
    );
    let times = since.map(|time| Value::Integer(time.as_millis()));
    let mut statement = connection.prepare_cached(&sql)?;
    let mut rows = statement.query(params_from_iter(times.into_iter().chain(params)))?;
    let mut texts = Texts::new(connection);
    let mut topics: BTreeMap<String, TopicCounts> = BTreeMap::new();
    while let Some(row) = rows.next()? {
        let count = |column| row.get(column).map(|count: i64| count.unsigned_abs());
        let topic = texts.text(TextTable::Texts, row.get("topic_id")?)?;
        let class = texts.text(TextTable::Texts, row.get("error_class_id")?)?;
        let state: i64 = row.get("state")?;
        let counts = topics.entry(topic).or_default();
        counts.add(class, state, count("total")?);
        for (sum, column) in counts.since.iter_mut().zip(["since_0", "since_1", "since_2"]) {
            *sum += count(column)?;
        }
        if state == OPEN {
            counts.add_open(row.get("oldest")?, row.get("newest")?);
        }
    }
    Ok(topics)
}

/// The open dead letters of a topic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OpenLetters {
    pub(crate) count: i64,
    /// `dead_at` of the oldest one.
    pub(crate) oldest: Timestamp,
}

/// The open dead letters of each topic that has any.
pub(crate) fn open_by_topic(connection: &Connection) -> rusqlite::Result<BTreeMap<String, OpenLetters>> {
    let everything = Expr::And(Vec::new());
    let counts = counts_of_writer(connection, &everything, [Timestamp::from_millis(i64::MAX); 3])?;
    let open = counts.into_iter().filter_map(|(topic, counts)| {
        let open = OpenLetters {
            count: i64::try_from(counts.open).unwrap_or(i64::MAX),
            oldest: counts.oldest?,
        };
        Some((topic, open))
    });
    Ok(open.collect())
}

/// The content hash of the record at an offset of a topic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordDigest {
    /// The partition.
    pub partition: i32,
    /// The offset.
    pub offset: i64,
    /// The hash of the record.
    pub content: ContentHash,
}

impl RecordDigest {
    fn from_row(row: &Row<'_>) -> rusqlite::Result<Self> {
        Ok(Self {
            partition: row.get("partition")?,
            offset: row.get("offset")?,
            content: row.get("content")?,
        })
    }
}

/// The first and the last dead letter of each given partition of a topic. Dead letters below the partition's low
/// watermark are ignored, because Kafka no longer has them.
pub(crate) fn first_and_last(
    connection: &Connection,
    topic: &str,
    low_watermarks: &[(i32, i64)],
) -> rusqlite::Result<Vec<RecordDigest>> {
    let mut digests: Vec<RecordDigest> = Vec::new();
    let Some(topic_id) = TextTable::Texts.find(connection, topic)? else {
        return Ok(digests);
    };
    for (partition, low) in low_watermarks {
        for order in ["ASC", "DESC"] {
            let sql = format!(
                "SELECT l.partition AS partition, l.offset AS offset, l.content AS content \
                 FROM letters l INDEXED BY letters_by_position \
                 WHERE l.topic_id = ? AND l.partition = ? AND l.offset >= ? ORDER BY l.offset {order} LIMIT 1"
            );
            let digest = connection
                .prepare_cached(&sql)?
                .query_row(params![topic_id, partition, low], RecordDigest::from_row)
                .optional()?;
            digests.extend(digest.filter(|digest| !digests.contains(digest)));
        }
    }
    Ok(digests)
}
