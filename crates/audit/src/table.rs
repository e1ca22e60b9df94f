//! The state of each origin, in 24 bytes. States are stored in pages of adjacent offsets, so that tens of millions of
//! records fit in memory, and a forged origin with a large offset costs only one small page.

use std::collections::BTreeMap;
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

/// Twelve flags of a life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mark(u16);

impl Mark {
    pub(crate) const IN_SOURCE: Self = Self(1);
    pub(crate) const IN_TIER: Self = Self(2);
    pub(crate) const IN_DUE: Self = Self(4);
    pub(crate) const UNREAD_IN_SOURCE: Self = Self(8);
    pub(crate) const UNREAD_IN_TIER: Self = Self(16);
    pub(crate) const UNREAD_IN_DUE: Self = Self(32);
    /// An end was read before the committed offsets of the groups.
    pub(crate) const ENDED_BEFORE: Self = Self(64);
    pub(crate) const ALTERED: Self = Self(128);
    pub(crate) const WITH_SCHEDULER: Self = Self(256);
    pub(crate) const WAITS_WITH_SCHEDULER: Self = Self(512);
    /// The redrive with which the life began may have changed the value and the header that describes it.
    pub(crate) const EDITED_VALUE: Self = Self(1024);
    /// It may have changed the key or the other headers.
    pub(crate) const EDITED_REST: Self = Self(2048);
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

    fn is_seen(&self) -> bool {
        self.marks != 0 || self.has_ended()
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.outputs > 0 || self.dead > 0
    }

    /// The topic in which the record waits. If two copies are unread, the later one counts.
    pub(crate) fn waits_in(&self) -> Option<Role> {
        let places = [
            (Mark::UNREAD_IN_DUE, Role::Due),
            (Mark::WAITS_WITH_SCHEDULER, Role::Scheduler),
            (Mark::UNREAD_IN_TIER, Role::Tier),
            (Mark::UNREAD_IN_SOURCE, Role::Source),
        ];
        places
            .into_iter()
            .find(|(mark, _)| self.has(*mark))
            .map(|(_, role)| role)
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

const PAGE: usize = 64;

/// All lives of all origins.
#[derive(Default)]
pub(crate) struct Table {
    first_lives: BTreeMap<Place, Box<[Life; PAGE]>>,
    later_lives: BTreeMap<(Place, u32), Life>,
}

impl Table {
    /// A life of an origin, created if it is new.
    pub(crate) fn life(&mut self, place: Place, life: u32) -> &mut Life {
        if life > 0 {
            return self.later_lives.entry((place, life)).or_default();
        }
        let (page, index) = split(place);
        let page = self
            .first_lives
            .entry(page)
            .or_insert_with(|| Box::new([Life::default(); PAGE]));
        &mut page[index]
    }

    /// The first life of an origin, if any copy of it was read.
    pub(crate) fn first_life(&self, place: Place) -> Option<&Life> {
        let (page, index) = split(place);
        self.first_lives
            .get(&page)
            .map(|page| &page[index])
            .filter(|life| life.is_seen())
    }

    /// The last life of an origin before this one of which a copy was read, with its number.
    pub(crate) fn life_before(&self, place: Place, life: u32) -> Option<(u32, &Life)> {
        let mut earlier = self.later_lives.range((place, 0)..(place, life));
        let earlier = earlier.next_back().map(|((_, number), found)| (*number, found));
        earlier.or_else(|| Some((0, self.first_life(place).filter(|_| life > 0)?)))
    }

    /// Every life of which a copy was read: the first lives in order of their origins, then the others.
    pub(crate) fn lives(&self) -> impl Iterator<Item = (Place, u32, &Life)> {
        let first = self.first_lives.iter().flat_map(|((partition, page), lives)| {
            let base = page * PAGE as i64;
            let lives = lives.iter().enumerate();
            lives.map(move |(index, life)| ((*partition, base + index as i64), 0, life))
        });
        let later = self
            .later_lives
            .iter()
            .map(|((place, number), life)| (*place, *number, life));
        first.filter(|(_, _, life)| life.is_seen()).chain(later)
    }

    /// The redriven origins, with the number of their last life.
    pub(crate) fn last_lives(&self) -> BTreeMap<Place, u32> {
        self.later_lives.keys().copied().collect()
    }
}

fn split((partition, offset): Place) -> (Place, usize) {
    let index = offset.rem_euclid(PAGE as i64);
    (
        (partition, offset.div_euclid(PAGE as i64)),
        usize::try_from(index).unwrap_or(0),
    )
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
    fn lives_are_listed_in_order() {
        let mut table = Table::default();
        let places = [(0, 0), (0, 63), (0, 64), (1, i64::MAX), (7, 1)];
        for place in places.into_iter().rev() {
            table.life(place, 0).mark(Mark::IN_SOURCE);
        }
        table.life((0, 5), 0);
        table.life((0, 5), 2).mark(Mark::IN_DUE);
        let lives: Vec<_> = table.lives().map(|(place, number, _)| (place, number)).collect();
        let expected: Vec<_> = places
            .into_iter()
            .map(|place| (place, 0))
            .chain([((0, 5), 2)])
            .collect();
        assert_eq!(lives, expected);
        assert!(table.first_life((0, 5)).is_none() && table.first_life((0, 63)).is_some());
        assert_eq!(table.last_lives(), BTreeMap::from([((0, 5), 2)]));
    }
}
