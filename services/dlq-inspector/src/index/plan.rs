//! Which index drives a query. The choice is made here and not by SQLite's planner, so that it does not depend on statistics
//! of the tables. Whatever drives a query, the condition of the whole filter is tested for each row.

use redeliver_core::Timestamp;
use rusqlite::types::Value;

use super::{row_key, terms};
use crate::filter::{
    Comparison, Condition, Dictionary, Expr, Lookups, NumberField, NumberTest, Restriction, TextField,
    TextTest,
};
use crate::ledger::State;

/// In a state with at most this many dead letters, all of them are tested rather than those that the full-text index finds.
pub(super) const FEW_ROWS: i64 = 5_000;

/// Finding one row of so many costs about as much as reading all of them.
pub(super) const FEW_OF: i64 = 4;
/// All dead letters.
const ANY_STATE: Restriction = Restriction::Number(NumberField::State, NumberTest::Present);

/// What finds the rows of a query.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Driver {
    /// All rows, in the order of time.
    Time,
    /// A query of the full-text index, which returns rows in the order of time.
    Terms(String),
    /// The dead letters of a topic in a state, in the order of `dead_at`.
    TopicAndState,
    /// The dead letters in a state with an error code, in the order of `dead_at`.
    StateAndCode,
    /// The dead letters in a state, in the order of `dead_at`.
    State,
    /// One row.
    Position,
}

impl Driver {
    /// The tables, as in `FROM`. `CROSS JOIN` fixes their order. With `NOT INDEXED`, rows are still found by their number.
    fn tables(&self) -> &'static str {
        match self {
            Self::Time => "letters l NOT INDEXED",
            Self::Terms(_) => "terms CROSS JOIN letters l NOT INDEXED ON l.row = terms.rowid",
            Self::TopicAndState => "letters l INDEXED BY letters_by_topic_and_state",
            Self::StateAndCode => "letters l INDEXED BY letters_by_state_and_code",
            Self::State => "letters l INDEXED BY letters_by_state",
            Self::Position => "letters l INDEXED BY letters_by_position",
        }
    }

    /// The column that orders the rows and limits them to a range of times.
    fn column(&self) -> &'static str {
        match self {
            Self::Time => "l.row",
            Self::Terms(_) => "terms.rowid",
            Self::TopicAndState | Self::StateAndCode | Self::State | Self::Position => "l.dead_at",
        }
    }

    /// A range of times in the unit of that column.
    fn range(&self, TimeRange { from, to }: TimeRange) -> [i64; 2] {
        match self {
            Self::Time | Self::Terms(_) => [
                row_key::first(Timestamp::from_millis(from)),
                row_key::last(Timestamp::from_millis(to)),
            ],
            Self::TopicAndState | Self::StateAndCode | Self::State | Self::Position => [from, to],
        }
    }
}

/// A range of `dead_at`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TimeRange {
    pub(super) from: i64,
    pub(super) to: i64,
}

impl TimeRange {
    pub(super) const ALL: Self = Self {
        from: i64::MIN,
        to: i64::MAX,
    };

    /// The range to which a filter limits the rows.
    fn of(conjuncts: &[&Expr]) -> Self {
        let mut range = Self::ALL;
        for part in conjuncts {
            let (comparison, [first, last]) = match part {
                Expr::Is(Restriction::Number(NumberField::DeadAt, NumberTest::Compare(comparison, time))) => {
                    (comparison, [*time; 2])
                }
                Expr::Is(Restriction::Expiry(NumberTest::Compare(comparison, time), ages)) => {
                    let (longest, shortest) = (ages.values().max(), ages.values().min());
                    let time = |age: Option<&i64>| time.saturating_sub(age.copied().unwrap_or(0));
                    (comparison, [time(longest), time(shortest)])
                }
                _ => continue,
            };
            match comparison {
                Comparison::Equal => range.limit(first, last),
                Comparison::Less | Comparison::LessOrEqual => range.limit(i64::MIN, last),
                Comparison::Greater | Comparison::GreaterOrEqual => range.limit(first, i64::MAX),
            }
        }
        range
    }

    pub(super) fn limit(&mut self, from: i64, to: i64) {
        self.from = self.from.max(from);
        self.to = self.to.min(to);
    }
}

/// How to find the rows of a filter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Plan {
    pub(super) driver: Driver,
    pub(super) range: TimeRange,
    pub(super) condition: Condition,
}

impl Plan {
    /// `rows_with` returns the number of dead letters with a state or in some topics, and `finds_much` whether a query of the full-text index finds at least
    /// one of [`FEW_OF`] rows between two numbers of rows.
    pub(super) fn of(
        filter: &Expr,
        dictionary: &Dictionary,
        rows_with: impl Fn(&Restriction) -> rusqlite::Result<i64>,
        finds_much: impl FnOnce(&str, [i64; 2]) -> rusqlite::Result<bool>,
    ) -> rusqlite::Result<Self> {
        let conjuncts = filter.conjuncts();
        let find = |is: fn(&Restriction) -> bool| {
            conjuncts.iter().find_map(|part| match part {
                Expr::Is(restriction) if is(restriction) => Some(restriction),
                _ => None,
            })
        };
        let state = find(|restriction| {
            let is_equal = |test: &NumberTest| matches!(test, NumberTest::Compare(Comparison::Equal, _));
            matches!(restriction, Restriction::Number(NumberField::State, test) if is_equal(test))
        });
        let is_open = |state: &Restriction| {
            let open = NumberTest::Compare(Comparison::Equal, State::Open as i64);
            *state == Restriction::Number(NumberField::State, open)
        };
        let driver = if find(|restriction| matches!(restriction, Restriction::Id(_))).is_some() {
            Driver::Position
        } else if let Some(state) = state {
            if !is_open(state) && rows_with(state)? <= FEW_ROWS {
                Driver::State
            } else {
                let topics = find(|restriction| matches!(restriction, Restriction::TopicIn(_)));
                // Both counts are read only if there is nothing else to choose by.
                let is_state_smaller = || match topics {
                    Some(topics) => Ok(rows_with(state)? <= rows_with(topics)?),
                    None => Ok(true),
                };
                Self::driver_in_state(filter, &conjuncts, dictionary, is_state_smaller)?
            }
        } else {
            terms::query(filter, dictionary).map_or(Driver::Time, Driver::Terms)
        };
        let range = TimeRange::of(&conjuncts);
        let driver = match driver {
            Driver::Terms(query) if finds_by_template(&conjuncts, dictionary) => {
                let in_state = state.map(&rows_with).transpose()?;
                if in_state.is_some_and(|rows| rows <= FEW_ROWS) {
                    Driver::State
                } else if !finds_much(&query, Driver::Time.range(range))? {
                    Driver::Terms(query)
                } else if let Some(rows) = in_state
                    && rows.saturating_mul(FEW_OF) < rows_with(&ANY_STATE)?
                {
                    Driver::State
                } else {
                    Driver::Time
                }
            }
            driver => driver,
        };
        Ok(Self {
            driver,
            range,
            condition: Condition::of(filter, dictionary),
        })
    }

    /// With several equalities, the full-text index finds fewer rows than an index of the state and one of them.
    fn driver_in_state(
        filter: &Expr,
        conjuncts: &[&Expr],
        dictionary: &Dictionary,
        is_state_smaller: impl FnOnce() -> rusqlite::Result<bool>,
    ) -> rusqlite::Result<Driver> {
        let is_equality = |part: &&&Expr| {
            !matches!(part, Expr::Is(Restriction::TopicIn(_))) && terms::query(part, dictionary).is_some()
        };
        let has = |field| {
            conjuncts.iter().any(|part| {
                matches!(part, Expr::Is(Restriction::Text(found, TextTest::Equal(_))) if *found == field)
            })
        };
        let equalities = conjuncts.iter().filter(is_equality).count();
        let terms = || terms::query(filter, dictionary).map_or(Driver::State, Driver::Terms);
        Ok(match equalities {
            0 if is_state_smaller()? => Driver::State,
            0 => terms(),
            1 if has(TextField::Topic) => Driver::TopicAndState,
            1 if has(TextField::ErrorCode) => Driver::StateAndCode,
            _ => terms(),
        })
    }

    /// `FROM` and `WHERE`, with their parameters.
    pub(super) fn from(&self) -> (String, Vec<Value>) {
        let (tables, column) = (self.driver.tables(), self.driver.column());
        let bodies = if self.condition.reads_bodies {
            " CROSS JOIN bodies b ON b.row = l.row"
        } else {
            ""
        };
        let mut params = Vec::new();
        let mut matched = "";
        if let Driver::Terms(query) = &self.driver {
            matched = "terms MATCH ? AND ";
            params.push(Value::Text(query.clone()));
        }
        params.extend(self.driver.range(self.range).map(Value::Integer));
        params.extend(super::sql::values(&self.condition.params));
        let sql = format!(
            "FROM {tables}{bodies} WHERE {matched}{column} >= ? AND {column} <= ? AND {}",
            self.condition.sql
        );
        (sql, params)
    }

    /// The column that orders the rows: by `dead_at`, except within a bucket, see [`row_key`].
    pub(super) fn order(&self) -> &'static str {
        self.driver.column()
    }
}

/// Whether the full-text index finds rows by nothing but the templates of messages, of which the parts decide: these can be nearly all rows, and reading
/// rows one after the other is faster than finding each of them.
fn finds_by_template(conjuncts: &[&Expr], dictionary: &Dictionary) -> bool {
    let finds_else = |part: &&Expr| {
        let is_of_caller = matches!(part, Expr::Is(Restriction::TopicIn(_)));
        !is_of_caller && !Lookups::of(part).has_messages() && terms::query(part, dictionary).is_some()
    };
    dictionary.depends_on_parts() && !conjuncts.iter().any(finds_else)
}
