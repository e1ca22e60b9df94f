//! The lives of origins of which something can still follow. A record that has ended as it should needs no entry.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use redeliver_core::ErrorClass;

use crate::content::Content;

/// Partition and offset of an origin in the source topic.
pub(crate) type Place = (i32, i64);

/// The topic in which a copy of a record was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    Source,
    Tier,
    Scheduler,
    Due,
    Output,
    Dead,
}

impl Role {
    const ALL: [Self; 6] = [
        Self::Source,
        Self::Tier,
        Self::Scheduler,
        Self::Due,
        Self::Output,
        Self::Dead,
    ];
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Source => "the source",
            Self::Tier => "a tier",
            Self::Scheduler => "the scheduler",
            Self::Due => "the due topic",
            Self::Output => "the output",
            Self::Dead => "the dead letters",
        })
    }
}

/// A life of an origin: the partition and the offset of the origin in the source topic, and how often it was redriven before.
pub(crate) type Key = (i32, i64, u32);

/// Flags of a life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mark(u16);

impl Mark {
    pub(crate) const IN_SOURCE: Self = Self(1);
    pub(crate) const IN_TIER: Self = Self(2);
    pub(crate) const IN_DUE: Self = Self(4);
    pub(crate) const WITH_SCHEDULER: Self = Self(8);
    /// Its job has not ended.
    pub(crate) const WAITS_WITH_SCHEDULER: Self = Self(16);
    /// An end was read before the committed offsets of the groups.
    pub(crate) const ENDED_BEFORE: Self = Self(32);
    pub(crate) const ALTERED: Self = Self(64);
    /// The redrive with which the life began may have changed the value and the header that describes it.
    pub(crate) const EDITED_VALUE: Self = Self(128);
    /// It may have changed the key or the other headers.
    pub(crate) const EDITED_REST: Self = Self(256);
    /// It was settled, and is already in the counts.
    pub(crate) const COUNTED: Self = Self(512);
}

/// One life of an origin: from the source or a redrive to the output or the dead letters.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Life {
    value: u64,
    rest: u64,
    marks: u16,
    pub(crate) retries: u16,
    pub(crate) outputs: u8,
    pub(crate) dead: u8,
    /// How many copies are not processed yet, by the topic in which they are.
    unread: [u8; 4],
    pub(crate) class: Option<ErrorClass>,
    hashed: Hashed,
}

/// The topic of the copy from which each of the two hashes was taken, in four bits each: 0 for none, otherwise the role
/// plus 1.
#[derive(Clone, Copy, Debug, Default)]
struct Hashed(u8);

impl Hashed {
    fn value_from(self) -> Option<Role> {
        Self::role(self.0 & 15)
    }

    fn rest_from(self) -> Option<Role> {
        Self::role(self.0 >> 4)
    }

    fn set_value_from(&mut self, role: Role) {
        self.0 = self.0 & !15 | Self::number(role);
    }

    fn set_rest_from(&mut self, role: Role) {
        self.0 = self.0 & 15 | Self::number(role) << 4;
    }

    fn role(number: u8) -> Option<Role> {
        let index = usize::from(number).checked_sub(1)?;
        Role::ALL.get(index).copied()
    }

    fn number(role: Role) -> u8 {
        role as u8 + 1
    }
}

/// The parts of a copy that are compared with the other copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Compare {
    Everything,
    /// Not the value and the header that describes it.
    AllButValue,
    Nothing,
}

impl Life {
    pub(crate) fn mark(&mut self, mark: Mark) {
        self.marks |= mark.0;
    }

    pub(crate) fn has(&self, mark: Mark) -> bool {
        self.marks & mark.0 != 0
    }

    pub(crate) fn unmark(&mut self, mark: Mark) {
        self.marks &= !mark.0;
    }

    /// Counts a copy that is not processed yet.
    pub(crate) fn add_unread(&mut self, role: Role) {
        if let Some(count) = self.unread.get_mut(role as usize) {
            *count = count.saturating_add(1);
        }
    }

    /// One of these copies is processed.
    pub(crate) fn remove_unread(&mut self, role: Role) {
        if let Some(count) = self.unread.get_mut(role as usize) {
            *count = count.saturating_sub(1);
        }
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.outputs > 0 || self.dead > 0
    }

    /// The topic in which the record waits. If two copies are unread, the later one counts.
    pub(crate) fn waits_in(&self) -> Option<Role> {
        let later_first = [Role::Due, Role::Scheduler, Role::Tier, Role::Source];
        later_first.into_iter().find(|role| {
            let has_job = *role == Role::Scheduler && self.has(Mark::WAITS_WITH_SCHEDULER);
            has_job || self.unread[*role as usize] > 0
        })
    }

    /// Compares a copy with the first one that was read. Returns a description of the differences.
    pub(crate) fn compare(&mut self, role: Role, content: Content, what: Compare) -> Option<String> {
        let mut differences = Vec::new();
        if what != Compare::Nothing {
            match self.hashed.rest_from() {
                None => {
                    self.rest = content.rest;
                    self.hashed.set_rest_from(role);
                }
                Some(other) if self.rest != content.rest => {
                    differences.push(format!("key or headers differ between {role} and {other}"));
                }
                Some(_) => {}
            }
        }
        if what == Compare::Everything {
            match self.hashed.value_from() {
                None => {
                    self.value = content.value;
                    self.hashed.set_value_from(role);
                }
                Some(other) if self.value != content.value => {
                    differences.push(format!(
                        "value or content-type differs between {role} and {other}"
                    ));
                }
                Some(_) => {}
            }
        }
        (!differences.is_empty()).then(|| differences.join(", "))
    }

    /// Whether the known contents of this life and of the next one are equal, apart from what the redrive between them has edited.
    pub(crate) fn redriven_as(&self, next: &Self) -> bool {
        let differs = |a: u64, a_from: Option<Role>, b: u64, b_from: Option<Role>| {
            a_from.is_some() && b_from.is_some() && a != b
        };
        let (one, two) = (self.hashed, next.hashed);
        let differs_in_value = differs(self.value, one.value_from(), next.value, two.value_from());
        let differs_in_rest = differs(self.rest, one.rest_from(), next.rest, two.rest_from());
        (!differs_in_value || next.has(Mark::EDITED_VALUE))
            && (!differs_in_rest || next.has(Mark::EDITED_REST))
    }
}

/// The lives that are kept.
#[derive(Default)]
pub(crate) struct Table(BTreeMap<Key, Life>);

impl Table {
    /// A life of an origin, created if it is new.
    pub(crate) fn life(&mut self, key: Key) -> &mut Life {
        self.0.entry(key).or_default()
    }

    /// A life that is kept.
    pub(crate) fn get_mut(&mut self, key: Key) -> Option<&mut Life> {
        self.0.get_mut(&key)
    }

    pub(crate) fn contains(&self, key: Key) -> bool {
        self.0.contains_key(&key)
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// The lives of each origin in order.
    pub(crate) fn origins(&self) -> impl Iterator<Item = (Place, Vec<(u32, &Life)>)> {
        let mut lives = self.0.iter().peekable();
        std::iter::from_fn(move || {
            let ((partition, offset, number), life) = lives.next()?;
            let place = (*partition, *offset);
            let mut of_place = vec![(*number, life)];
            while let Some(((.., number), life)) =
                lives.next_if(|((partition, offset, _), _)| (*partition, *offset) == place)
            {
                of_place.push((*number, life));
            }
            Some((place, of_place))
        })
    }

    /// Removes lives that are settled. `is_settled` gets the origin, whether it was redriven, and the life.
    pub(crate) fn settle(&mut self, mut is_settled: impl FnMut(Place, bool, &Life) -> bool) {
        let later = self.0.keys().filter(|(.., number)| *number > 0);
        let redriven: BTreeSet<Place> = later
            .map(|(partition, offset, _)| (*partition, *offset))
            .collect();
        self.0.retain(|(partition, offset, _), life| {
            let place = (*partition, *offset);
            !is_settled(place, redriven.contains(&place), life)
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_have_separate_roles() {
        for value in Role::ALL {
            for rest in Role::ALL {
                let mut hashed = Hashed::default();
                assert_eq!((hashed.value_from(), hashed.rest_from()), (None, None));
                hashed.set_value_from(value);
                assert_eq!((hashed.value_from(), hashed.rest_from()), (Some(value), None));
                hashed.set_rest_from(rest);
                assert_eq!(
                    (hashed.value_from(), hashed.rest_from()),
                    (Some(value), Some(rest))
                );
            }
        }
    }

    #[test]
    fn lives_are_listed_by_origin() {
        let mut table = Table::default();
        let keys = [(0, 0, 0), (0, 5, 0), (0, 5, 2), (1, i64::MAX, 0), (7, 1, 3)];
        for key in keys.into_iter().rev() {
            table.life(key).mark(Mark::IN_SOURCE);
        }
        let listed = |table: &Table| -> Vec<(Place, Vec<u32>)> {
            let origins = table.origins();
            origins
                .map(|(place, lives)| (place, lives.iter().map(|(number, _)| *number).collect()))
                .collect()
        };
        let redriven = [((0, 5), vec![0, 2]), ((7, 1), vec![3])];
        let others = [((0, 0), vec![0]), ((1, i64::MAX), vec![0])];
        let [first, last] = redriven.clone();
        let [zero, far] = others;
        assert_eq!(listed(&table), [zero, first, far, last]);
        table.settle(|_, is_redriven, life| life.has(Mark::IN_SOURCE) && !is_redriven);
        assert_eq!(listed(&table), redriven);
    }

    #[test]
    fn unread_copies_are_counted() {
        let mut life = Life::default();
        assert_eq!(life.waits_in(), None);
        for role in [Role::Tier, Role::Tier, Role::Due] {
            life.add_unread(role);
        }
        assert_eq!(life.waits_in(), Some(Role::Due));
        life.remove_unread(Role::Due);
        life.remove_unread(Role::Tier);
        assert_eq!(life.waits_in(), Some(Role::Tier));
        life.mark(Mark::WAITS_WITH_SCHEDULER);
        assert_eq!(life.waits_in(), Some(Role::Scheduler));
        life.unmark(Mark::WAITS_WITH_SCHEDULER);
        life.remove_unread(Role::Tier);
        assert_eq!(life.waits_in(), None);
    }
}
