//! How far each partition was read, for each table. No IO.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use redeliver_core::Record;
use redeliver_kafka::TopicId;
use redeliver_kafka::follow::Start;
use redeliver_kafka::survey::{Extent, SurveyedTopic};

use crate::appender::Move;
use crate::rows::Origin;
use crate::sources::Source;

/// The topics that are read.
#[derive(Default)]
pub(super) struct Feeds(HashMap<Arc<str>, Topic>);

/// A topic that is read.
pub(super) struct Topic {
    id: Option<TopicId>,
    source: Source,
    /// By partition.
    feeds: Vec<Option<Feed>>,
    /// How it was absent from the last surveys, and how many.
    absent: Option<(Absence, u32)>,
}

/// Why a survey cannot say anything about a topic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Absence {
    /// It does not exist.
    Missing,
    /// Kafka refuses to describe it.
    Refused,
}

/// A partition that is read.
struct Feed {
    /// The application id of its positions.
    id: String,
    /// In the order of the tables of the source.
    positions: Vec<Position>,
    /// The offset of the next record.
    read: i64,
    /// Whether it is followed from there. If not, what arrives was requested before, from another offset.
    is_followed: bool,
    /// Whether it ends before `read`, because it has lost its last records.
    is_truncated: bool,
    /// Why Kafka refuses to let it be read.
    refusal: Option<String>,
    /// How far it was read at the last survey.
    surveyed: i64,
    /// How many surveys in a row have found records of which none was read, although it had its turn.
    idle: u32,
}

/// How far a partition is in a table.
struct Position {
    table: usize,
    /// `None`: the table has no position.
    committed: Option<i64>,
    /// The offset of the first record that is neither in the table nor in memory; 0: nothing was read.
    next: i64,
    /// The offset of the first record that was read, if the table has no position.
    first: i64,
}

/// Records that a table will never contain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Lost {
    pub(super) table: usize,
    pub(super) topic: Arc<str>,
    pub(super) topic_id: String,
    pub(super) partition: i32,
    /// The application id of the partition's positions, or of its gaps of another kind.
    pub(super) id: String,
    pub(super) from: i64,
    pub(super) until: i64,
}

/// The id of a topic, as Kafka's tools write it.
pub(crate) fn text_of(id: TopicId) -> String {
    BASE64_URL_SAFE_NO_PAD.encode(id.bits().to_be_bytes())
}

/// The name of a partition's position in a table.
pub(crate) fn application_id(topic: &str, topic_id: &str, partition: i32) -> String {
    format!("redeliver/{topic}/{topic_id}/{partition}")
}

impl Topic {
    pub(super) fn new(id: Option<TopicId>, source: Source) -> Self {
        Self {
            id,
            source,
            feeds: Vec::new(),
            absent: None,
        }
    }

    /// Whether this id shows that the topic was created again.
    pub(super) fn is_other(&self, found: Option<TopicId>) -> bool {
        self.id.zip(found).is_some_and(|(known, found)| known != found)
    }

    pub(super) fn has_id(&self) -> bool {
        self.id.is_some()
    }

    fn feed(&mut self, partition: i32) -> Option<&mut Feed> {
        let index = usize::try_from(partition).ok()?;
        self.feeds.get_mut(index)?.as_mut()
    }

    fn all(&mut self) -> impl Iterator<Item = (i32, &mut Feed)> {
        let feeds = (0..).zip(&mut self.feeds);
        feeds.filter_map(|(partition, feed)| Some((partition, feed.as_mut()?)))
    }

    /// The records of a partition from one offset to another that a table will never contain, if there are any.
    fn lost(
        &mut self,
        topic: &Arc<str>,
        partition: i32,
        range: impl Fn(&Position) -> Option<(i64, i64)>,
    ) -> Vec<Lost> {
        let topic_id = self.source.origin.topic_id.clone();
        let Some(feed) = self.feed(partition) else {
            return Vec::new();
        };
        let lost = feed.positions.iter().filter_map(|position| {
            let (from, until) = range(position)?;
            (from < until).then(|| Lost {
                table: position.table,
                topic: topic.clone(),
                topic_id: topic_id.clone(),
                partition,
                id: feed.id.clone(),
                from,
                until,
            })
        });
        lost.collect()
    }
}

impl Feed {
    /// Where to read from, so that no table lacks a record. It counts as followed only after [`Feeds::followed`].
    fn start(&mut self, topic: &Arc<str>, partition: i32) -> Start {
        self.is_followed = false;
        self.is_truncated = false;
        self.idle = 0;
        self.read = self
            .positions
            .iter()
            .map(|position| position.next)
            .min()
            .unwrap_or(0);
        Start {
            topic: topic.clone(),
            partition,
            from: (self.read > 0).then_some(self.read),
        }
    }

    /// Compares how far it was read with the last survey.
    fn surveyed(&mut self, extent: Extent, had_turn: bool) {
        let has_unread = self.is_followed && self.read.max(extent.low) < extent.end;
        if !has_unread || self.read != self.surveyed {
            self.idle = 0;
        } else if had_turn {
            self.idle += 1;
        }
        self.surveyed = self.read;
    }
}

impl Feeds {
    pub(super) fn topic(&self, topic: &str) -> Option<&Topic> {
        self.0.get(topic)
    }

    pub(super) fn add_topic(&mut self, name: &Arc<str>, topic: Topic) {
        self.0.insert(name.clone(), topic);
    }

    /// Adds a partition, or continues one that is not followed; one that was truncated waits until it has the next record. Returns from where to follow it, unless
    /// it is followed.
    pub(super) fn start<E>(
        &mut self,
        name: &Arc<str>,
        partition: i32,
        extent: Option<Extent>,
        position: impl Fn(usize, &str) -> Result<Option<i64>, E>,
    ) -> Result<Option<Start>, E> {
        let Some(topic) = self.0.get_mut(name) else {
            return Ok(None);
        };
        if let Some(feed) = topic.feed(partition) {
            let waits = feed.is_truncated && extent.is_none_or(|extent| extent.end < feed.read);
            return Ok((!feed.is_followed && !waits).then(|| feed.start(name, partition)));
        }
        let id = application_id(name, &topic.source.origin.topic_id, partition);
        let mut positions = Vec::new();
        for &table in &topic.source.tables {
            let committed = position(table, &id)?;
            positions.push(Position {
                table,
                committed,
                next: committed.unwrap_or(0),
                first: 0,
            });
        }
        let mut feed = Feed {
            id,
            positions,
            read: 0,
            is_followed: false,
            is_truncated: false,
            refusal: None,
            surveyed: -1,
            idle: 0,
        };
        let start = feed.start(name, partition);
        let index = usize::try_from(partition).unwrap_or(0);
        if topic.feeds.len() <= index {
            topic.feeds.resize_with(index + 1, || None);
        }
        topic.feeds[index] = Some(feed);
        Ok(Some(start))
    }

    /// These partitions are followed now.
    pub(super) fn followed(&mut self, starts: &[Start]) {
        for start in starts {
            if let Some(feed) = self.feed(&start.topic, start.partition) {
                feed.is_followed = true;
            }
        }
    }

    fn feed(&mut self, topic: &str, partition: i32) -> Option<&mut Feed> {
        self.0.get_mut(topic)?.feed(partition)
    }

    /// Passes a record on to the tables that lack it.
    pub(super) fn read(&mut self, record: &Record, mut add: impl FnMut(usize, &Origin)) {
        let at = &record.position;
        let Some(topic) = self.0.get_mut(&at.topic) else {
            return;
        };
        let Ok(index) = usize::try_from(at.partition) else {
            return;
        };
        let Some(Some(feed)) = topic.feeds.get_mut(index) else {
            return;
        };
        if !feed.is_followed {
            return;
        }
        feed.refusal = None;
        feed.read = at.offset + 1;
        for position in &mut feed.positions {
            if at.offset >= position.next {
                if position.next == 0 {
                    position.first = at.offset;
                }
                add(position.table, &topic.source.origin);
                position.next = at.offset + 1;
            }
        }
    }

    /// All records before this offset were read. Visits the tables whose positions this moves.
    pub(super) fn ended(&mut self, topic: &str, partition: i32, offset: i64, mut moved: impl FnMut(usize)) {
        let Some(feed) = self.feed(topic, partition).filter(|feed| feed.is_followed) else {
            return;
        };
        feed.refusal = None;
        feed.read = feed.read.max(offset);
        for position in &mut feed.positions {
            if offset > position.next {
                if position.next == 0 {
                    position.first = offset;
                }
                position.next = offset;
                moved(position.table);
            }
        }
    }

    /// How many offsets of a topic are in no table yet.
    pub(super) fn lag(&mut self, found: &SurveyedTopic) -> i64 {
        let Some(topic) = self.0.get_mut(&found.name) else {
            return 0;
        };
        let partitions = (0..).zip(&found.partitions);
        let lags = partitions.filter_map(|(partition, extent)| {
            let (extent, feed) = ((*extent)?, topic.feed(partition)?);
            let positions = feed.positions.iter();
            let committed = positions.map(|position| position.committed.unwrap_or(0)).min()?;
            Some((extent.end - committed.max(extent.low)).max(0))
        });
        lags.sum()
    }

    /// Compares how far partitions were read with the last survey. Returns whether one of them has stood still for so many surveys; counting then begins
    /// again. `had_turn`: whether all of them could return records since then.
    pub(super) fn is_stalled(&mut self, found: &[SurveyedTopic], had_turn: bool, surveys: u32) -> bool {
        for found in found {
            for (partition, extent) in (0..).zip(&found.partitions) {
                if let (Some(feed), Some(extent)) = (self.feed(&found.name, partition), extent) {
                    feed.surveyed(*extent, had_turn);
                }
            }
        }
        let mut feeds: Vec<&mut Feed> = self
            .0
            .values_mut()
            .flat_map(Topic::all)
            .map(|(_, feed)| feed)
            .collect();
        let is_stalled = feeds.iter().any(|feed| feed.idle >= surveys);
        if is_stalled {
            feeds.iter_mut().for_each(|feed| feed.idle = 0);
        }
        is_stalled
    }

    /// The names of the topics.
    pub(super) fn names(&self) -> BTreeSet<Arc<str>> {
        self.0.keys().cloned().collect()
    }

    /// The topics that were absent from this survey and from as many before it, in the same way, that this is no accident.
    pub(super) fn absent(&mut self, found: &[SurveyedTopic], surveys: u32) -> Vec<(Arc<str>, Absence)> {
        let mut absent = Vec::new();
        for (name, topic) in &mut self.0 {
            let absence = match found.iter().find(|found| found.name == *name) {
                None => Absence::Missing,
                Some(found) if found.refusal.is_some() => Absence::Refused,
                Some(_) => {
                    topic.absent = None;
                    continue;
                }
            };
            let before = topic.absent.filter(|(before, _)| *before == absence);
            let count = before.map_or(0, |(_, count)| count) + 1;
            topic.absent = Some((absence, count));
            if count >= surveys {
                absent.push((name.clone(), absence));
            }
        }
        absent
    }

    /// What a commit of a table changes, and the topics of these partitions.
    pub(super) fn moves(&mut self, table: usize) -> (Vec<Move>, Vec<Arc<str>>) {
        let (mut moves, mut topics) = (Vec::new(), Vec::new());
        for (name, topic) in &mut self.0 {
            let before = moves.len();
            for (_, feed) in topic.all() {
                let position = feed.positions.iter().find(|position| position.table == table);
                if let Some(position) = position
                    && position.next > position.committed.unwrap_or(0)
                {
                    moves.push(Move {
                        id: feed.id.clone(),
                        from: position.committed,
                        to: position.next,
                    });
                }
            }
            if moves.len() > before {
                topics.push(name.clone());
            }
        }
        (moves, topics)
    }

    /// The moves of a table were committed.
    pub(super) fn committed(&mut self, table: usize) {
        for topic in self.0.values_mut() {
            for (_, feed) in topic.all() {
                let positions = feed.positions.iter_mut();
                for position in positions.filter(|position| position.table == table && position.next > 0) {
                    position.committed = Some(position.next);
                }
            }
        }
    }

    /// Reads the positions of a table again, whose rows in memory were dropped. Returns from where to follow partitions.
    pub(super) fn reload<E>(
        &mut self,
        table: usize,
        position: impl Fn(&str) -> Result<Option<i64>, E>,
    ) -> Result<Vec<Start>, E> {
        let mut starts = Vec::new();
        for (name, topic) in &mut self.0 {
            for (partition, feed) in topic.all() {
                let was_followed = feed.is_followed;
                let mut positions = feed.positions.iter_mut();
                let Some(of_table) = positions.find(|position| position.table == table) else {
                    continue;
                };
                of_table.committed = position(&feed.id)?;
                of_table.next = of_table.committed.unwrap_or(0);
                // Surveys start those that cannot be followed now.
                let start = feed.start(name, partition);
                starts.extend(was_followed.then_some(start));
            }
        }
        Ok(starts)
    }

    /// What was read of a topic since the last commits.
    pub(super) fn uncommitted(&mut self, name: &Arc<str>) -> Vec<Lost> {
        let Some(topic) = self.0.get_mut(name) else {
            return Vec::new();
        };
        let partitions: Vec<i32> = topic.all().map(|(partition, _)| partition).collect();
        let lost = partitions.into_iter().flat_map(|partition| {
            topic.lost(name, partition, |position| {
                Some((position.committed.unwrap_or(position.first), position.next))
            })
        });
        lost.collect()
    }

    /// What tables lack of a partition before this offset. Tables without a position have not missed anything.
    pub(super) fn before(&mut self, name: &Arc<str>, partition: i32, low: i64) -> Vec<Lost> {
        let Some(topic) = self.0.get_mut(name) else {
            return Vec::new();
        };
        topic.lost(name, partition, |position| {
            (position.next > 0).then_some((position.next, low))
        })
    }

    /// What tables will lack of a partition that has lost its last records: they skip the next ones with the same offsets. Where it ended is known only if it has
    /// not grown since: at least the records from there on, and the last one, are others.
    pub(super) fn truncated(&mut self, name: &Arc<str>, partition: i32, end: i64) -> Vec<Lost> {
        let Some(topic) = self.0.get_mut(name) else {
            return Vec::new();
        };
        let is_read = topic.feed(partition).is_some_and(|feed| feed.read > 0);
        let mut lost = topic.lost(name, partition, |position| {
            (is_read && position.next > 0).then_some((end.min(position.next - 1), position.next))
        });
        // The gaps of deleted records have positions of their own, which may be beyond.
        for lost in &mut lost {
            lost.id.push_str("/truncated");
        }
        lost
    }

    /// Skips missing records of a partition. Returns from where to follow it; `None` if the partition ends before.
    pub(super) fn skip_to(&mut self, name: &Arc<str>, partition: i32, extent: Extent) -> Option<Start> {
        let feed = self.feed(name, partition)?;
        for position in &mut feed.positions {
            if position.next > 0 {
                position.next = position.next.max(extent.low);
            }
        }
        let start = feed.start(name, partition);
        feed.is_truncated = feed.read > extent.end;
        (!feed.is_truncated).then_some(start)
    }

    /// A partition is not followed any more. The survey that finds its next record starts it again.
    pub(super) fn stop(&mut self, name: &str, partition: i32) {
        if let Some(feed) = self.feed(name, partition) {
            feed.is_followed = false;
            feed.refusal = None;
        }
    }

    /// Whether a table has a position of a partition.
    pub(super) fn has_position(&mut self, name: &str, partition: i32) -> bool {
        let feed = self.feed(name, partition);
        feed.is_some_and(|feed| feed.positions.iter().any(|position| position.next > 0))
    }

    /// Kafka refuses to let a partition be read. The next survey starts it again.
    pub(super) fn refused(&mut self, name: &str, partition: i32, error: String) {
        if let Some(feed) = self.feed(name, partition) {
            feed.is_followed = false;
            feed.refusal = Some(error);
        }
    }

    /// A partition that Kafka refuses to let be read, and why.
    pub(super) fn refusal(&mut self) -> Option<String> {
        self.0.iter_mut().find_map(|(name, topic)| {
            let mut feeds = topic.all();
            feeds
                .find_map(|(partition, feed)| Some(format!("{name}/{partition}: {}", feed.refusal.as_ref()?)))
        })
    }

    /// A topic is not followed any more, until a survey starts its partitions again. Returns the tables that have rows of it in memory.
    pub(super) fn suspend(&mut self, name: &str) -> Vec<usize> {
        let Some(topic) = self.0.get_mut(name) else {
            return Vec::new();
        };
        let mut tables = BTreeSet::new();
        for (_, feed) in topic.all() {
            feed.is_followed = false;
            let read = feed
                .positions
                .iter()
                .filter(|position| position.next > position.committed.unwrap_or(0));
            tables.extend(read.map(|position| position.table));
        }
        tables.into_iter().collect()
    }

    /// Forgets a topic, and returns its tables.
    pub(super) fn forget(&mut self, name: &str) -> Vec<usize> {
        let topic = self.0.remove(name);
        topic.map_or_else(Vec::new, |topic| topic.source.tables)
    }
}

#[cfg(test)]
mod tests;
