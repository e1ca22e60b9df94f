//! Limits of concurrent attempts per group of records: order by key or partition, and fairness between tenants.
//!
//! A record belongs to at most two groups, see [`Grouping`]. It enters the one whose records are processed one after the
//! other when it arrives, and leaves it when its result is final, so that a record whose attempt is repeated keeps its
//! place. It is in the other one, which limits concurrent attempts, only during an attempt.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use redeliver_core::Record;
use redeliver_core::json::{self, Scalar};

/// Which records wait for each other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Grouping {
    /// Records that are processed one after the other.
    pub ordering: Ordering,
    /// With an ordering: for how long a record whose attempts fail is repeated before it waits in a tier. Its followers wait
    /// meanwhile. These attempts do not count as failed.
    pub key_blocking: Option<Duration>,
    /// A limit of concurrent attempts for records with the same property.
    pub limit: Option<GroupLimit>,
}

/// Records that are processed one after the other, in their order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Ordering {
    /// None.
    #[default]
    None,
    /// Those with the same key. Records without a key are not ordered.
    Key,
    /// Those of the same partition.
    Partition,
}

/// A limit of concurrent attempts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupLimit {
    /// What the records of a group have in common. Those that lack it are a group too, so that they do not evade the limit.
    pub by: GroupBy,
    /// Maximum number of concurrent attempts of a group, per driver: a lane of the source and a lane of the due topic. 0
    /// counts as 1.
    pub concurrency: usize,
}

/// A property of records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GroupBy {
    /// The key.
    Key,
    /// The first value of a header.
    Header(String),
    /// A string, number or boolean in the JSON value, by JSON pointer (RFC 6901). All spellings of a number are the same.
    Pointer(String),
}

/// Identifies a group.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Group {
    Of(Bytes),
    /// Records that lack the property.
    Without,
    Partition(Arc<str>, i32),
}

/// The groups of a record.
#[derive(Clone, Debug, Default)]
pub(crate) struct GroupsOf {
    /// Whose records are processed one after the other.
    pub(crate) ordered: Option<Group>,
    /// With a limit of concurrent attempts.
    pub(crate) limited: Option<Group>,
}

impl Grouping {
    pub(crate) fn of(&self, record: &Record) -> GroupsOf {
        GroupsOf {
            ordered: match self.ordering {
                Ordering::None => None,
                Ordering::Key => record.key.clone().map(Group::Of),
                Ordering::Partition => {
                    let position = &record.position;
                    Some(Group::Partition(position.topic.clone(), position.partition))
                }
            },
            limited: self.limit.as_ref().map(|limit| limit.by.group_of(record)),
        }
    }
}

impl GroupBy {
    fn group_of(&self, record: &Record) -> Group {
        let property = match self {
            Self::Key => record.key.clone(),
            Self::Header(name) => {
                let mut values = record.headers.iter().filter(|(other, _)| other == name);
                values
                    .next()
                    .and_then(|(_, value)| value)
                    .map(Bytes::copy_from_slice)
            }
            Self::Pointer(pointer) => record
                .value
                .as_deref()
                .and_then(|value| scalar_at(value, pointer)),
        };
        property.map_or(Group::Without, Group::Of)
    }
}

fn scalar_at(value: &[u8], pointer: &str) -> Option<Bytes> {
    let scalar = json::scalar_at(value, pointer).ok().flatten();
    Some(Scalar::into_text(scalar?).into_owned().into())
}

impl GroupsOf {
    /// Whether other records wait until this one has ended.
    pub(crate) fn is_ordered(&self) -> bool {
        self.ordered.is_some()
    }
}

/// Groups with the same limit, and the records that wait until there is room in theirs.
pub(crate) struct Groups<T> {
    limit: usize,
    members: HashMap<Group, Members<T>>,
    /// The number of records that wait, in all groups.
    waiting: usize,
}

struct Members<T> {
    entered: usize,
    waiting: VecDeque<T>,
}

impl<T> Groups<T> {
    /// At most `limit` records are in each group. 0 counts as 1.
    pub(crate) fn new(limit: usize) -> Self {
        Self {
            limit: limit.max(1),
            members: HashMap::new(),
            waiting: 0,
        }
    }

    /// How many records wait until there is room in their groups.
    pub(crate) fn waiting(&self) -> usize {
        self.waiting
    }

    /// Returns the record if there is room in its group. Otherwise it waits. A record without a group never waits.
    pub(crate) fn enter(&mut self, group: Option<Group>, record: T) -> Option<T> {
        let Some(group) = group else { return Some(record) };
        let members = self.members.entry(group).or_insert_with(|| Members {
            entered: 0,
            waiting: VecDeque::new(),
        });
        if members.entered < self.limit {
            members.entered += 1;
            return Some(record);
        }
        members.waiting.push_back(record);
        self.waiting += 1;
        None
    }

    /// Takes note that a record that had entered the group has left it. Returns the next one, see [`Groups::next`].
    pub(crate) fn leave(&mut self, group: Option<&Group>) -> Option<T> {
        let group = group?;
        self.members.get_mut(group)?.entered -= 1;
        self.next(Some(group))
    }

    /// Removes the record that has waited longest, if there is room in the group. The caller lets it enter, or asks for the
    /// next one.
    pub(crate) fn next(&mut self, group: Option<&Group>) -> Option<T> {
        let group = group?;
        let members = self.members.get_mut(group)?;
        let has_room = members.entered < self.limit;
        let next = has_room.then(|| members.waiting.pop_front()).flatten();
        self.waiting -= usize::from(next.is_some());
        if members.entered == 0 && members.waiting.is_empty() {
            self.members.remove(group);
        }
        next
    }

    /// Removes waiting records for which `is_removed` returns true.
    pub(crate) fn remove(&mut self, is_removed: impl Fn(&T) -> bool) -> Vec<T> {
        let mut removed = Vec::new();
        self.members.retain(|_, members| {
            let waiting = std::mem::take(&mut members.waiting).into_iter();
            let (gone, kept): (Vec<T>, Vec<T>) = waiting.partition(&is_removed);
            members.waiting = kept.into();
            removed.extend(gone);
            members.entered > 0 || !members.waiting.is_empty()
        });
        self.waiting -= removed.len();
        removed
    }

    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.members.is_empty()
    }
}

#[cfg(test)]
mod tests;
