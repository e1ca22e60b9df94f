//! Limits of concurrent attempts per group of records: order by key or partition, and fairness between tenants.
//!
//! A record belongs to at most two groups, see [`Grouping`]: one whose records are processed one after the other, in their
//! order, and one with a limit of its own. A record enters both before its attempt and leaves them when its result is
//! final, so that a record whose attempt is repeated keeps its place.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use redeliver_core::{Record, mutant};

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
    /// A string, number or boolean in the JSON value, by JSON pointer (RFC 6901).
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
    ordered: Option<Group>,
    limited: Option<Group>,
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
    let document: serde_json::Value = serde_json::from_slice(value).ok()?;
    match document.pointer(pointer)? {
        serde_json::Value::String(text) => Some(text.clone().into()),
        scalar @ (serde_json::Value::Number(_) | serde_json::Value::Bool(_)) => {
            Some(scalar.to_string().into())
        }
        _ => None,
    }
}

impl GroupsOf {
    /// Whether other records wait until this one has ended.
    pub(crate) fn is_ordered(&self) -> bool {
        self.ordered.is_some()
    }
}

/// Records that wait until others of their groups have left. `T` is a record with its groups.
pub(crate) struct Groups<T> {
    ordered: Limited<T>,
    limited: Limited<T>,
}

impl<T> Groups<T> {
    pub(crate) fn new(grouping: &Grouping) -> Self {
        let limit = grouping.limit.as_ref();
        Self {
            ordered: Limited::new(1),
            limited: Limited::new(limit.map_or(usize::MAX, |limit| limit.concurrency.max(1))),
        }
    }

    /// Returns the record if its attempt may start.
    pub(crate) fn enter(&mut self, record: T, groups: impl Fn(&T) -> &GroupsOf) -> Option<T> {
        let ordered = groups(&record).ordered.clone();
        let record = self.ordered.enter(ordered, record)?;
        let limited = groups(&record).limited.clone();
        self.limited.enter(limited, record)
    }

    /// Takes note that a record that has entered these groups has ended. Returns those whose attempts may start now.
    pub(crate) fn leave(&mut self, left: &GroupsOf, groups: impl Fn(&T) -> &GroupsOf) -> Vec<T> {
        let next_limited = left.limited.as_ref().and_then(|group| self.limited.leave(group));
        let next_ordered = left.ordered.as_ref().and_then(|group| self.ordered.leave(group));
        let next_ordered = next_ordered.and_then(|next| {
            let limited = groups(&next).limited.clone();
            self.limited.enter(limited, next)
        });
        next_limited.into_iter().chain(next_ordered).collect()
    }

    /// Removes waiting records for which `is_removed` returns true. A record that waits for its limit has already entered its
    /// order, so the caller must let it leave.
    pub(crate) fn remove(
        &mut self,
        is_removed: impl Fn(&T) -> bool,
        groups: impl Fn(&T) -> &GroupsOf,
    ) -> Removed<T> {
        let mut records = self.ordered.remove(&is_removed);
        let after_order = self.limited.remove(&is_removed);
        let left = after_order.iter().map(|record| GroupsOf {
            ordered: groups(record).ordered.clone(),
            limited: None,
        });
        let left = left.collect();
        records.extend(after_order);
        Removed { records, left }
    }
}

/// Records that were removed, and the groups that they leave.
pub(crate) struct Removed<T> {
    pub(crate) records: Vec<T>,
    pub(crate) left: Vec<GroupsOf>,
}

/// Groups with the same limit.
struct Limited<T> {
    limit: usize,
    groups: HashMap<Group, Members<T>>,
}

struct Members<T> {
    entered: usize,
    waiting: VecDeque<T>,
}

impl<T> Limited<T> {
    fn new(limit: usize) -> Self {
        Self {
            limit,
            groups: HashMap::new(),
        }
    }

    fn enter(&mut self, group: Option<Group>, record: T) -> Option<T> {
        let Some(group) = group else { return Some(record) };
        let members = self.groups.entry(group).or_insert_with(|| Members {
            entered: 0,
            waiting: VecDeque::new(),
        });
        if members.entered < self.limit || mutant!("groups-have-no-limit") {
            members.entered += 1;
            return Some(record);
        }
        members.waiting.push_back(record);
        None
    }

    fn leave(&mut self, group: &Group) -> Option<T> {
        let members = self.groups.get_mut(group)?;
        if let Some(next) = members.waiting.pop_front() {
            return Some(next);
        }
        members.entered -= 1;
        if members.entered == 0 {
            self.groups.remove(group);
        }
        None
    }

    /// A group with waiting records has entered ones, so none of the groups becomes empty.
    fn remove(&mut self, is_removed: impl Fn(&T) -> bool) -> Vec<T> {
        let mut removed = Vec::new();
        for members in self.groups.values_mut() {
            let waiting = std::mem::take(&mut members.waiting).into_iter();
            let (gone, kept): (Vec<T>, Vec<T>) = waiting.partition(&is_removed);
            members.waiting = kept.into();
            removed.extend(gone);
        }
        removed
    }
}

#[cfg(test)]
mod tests;
