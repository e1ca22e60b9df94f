//! Which index drives a query. The choice is made here and not by SQLite's planner, so that it does not depend on statistics
//! of the tables. Whatever drives a query, the condition of the whole filter is tested for each row.

use redeliver_core::Timestamp;
use rusqlite::types::Value;

use super::{row_key, terms};
use crate::filter::{
    Comparison, Condition, Dictionary, Expr, NumberField, NumberTest, Restriction, TextField, TextTest,
};
use crate::ledger::State;

/// In a state with at most this many dead letters, all of them are tested rather than those that the full-text index finds.
pub(super) const FEW_ROWS: i64 = 5_000;

/// What finds the rows of a query.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Driver {
    /// All rows, in the order of time.
    Time,
    /// A query of the full-text index, which returns rows in the order of time.
    Terms(String),
    /// An index whose rows are in the order of `dead_at`.
    Index(&'static str),
    /// One row.
    Position,
}

/// A range of `dead_at`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TimeRange {
    pub(super) from: i64,
    pub(super) to: i64,
}

impl TimeRange {
    const ALL: Self = Self { from: i64::MIN, to: i64::MAX };

    /// The range to which a filter limits the rows.
    fn of(conjuncts: &[&Expr]) -> Self {
        let mut range = Self::ALL;
        for part in conjuncts {
            let Expr::Is(Restriction::Number(NumberField::DeadAt, NumberTest::Compare(comparison, time))) = part else {
                continue;
            };
            match comparison {
                Comparison::Equal => range.limit(*time, *time),
                Comparison::Less | Comparison::LessOrEqual => range.limit(i64::MIN, *time),
                Comparison::Greater | Comparison::GreaterOrEqual => range.limit(*time, i64::MAX),
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
    /// `rows_in_state` returns the number of dead letters in a state.
    pub(super) fn of(
        filter: &Expr,
        dictionary: &Dictionary,
        rows_in_state: impl FnOnce(i64) -> rusqlite::Result<i64>,
    ) -> rusqlite::Result<Self> {
        let conjuncts = filter.conjuncts();
        let has_text = |field| {
            let test = |part: &&&Expr| matches!(part, Expr::Is(Restriction::Text(found, TextTest::Equal(_))) if *found == field);
            conjuncts.iter().any(|part| test(&part))
        };
        let has_id = conjuncts.iter().any(|part| matches!(part, Expr::Is(Restriction::Id(_))));
        let state = conjuncts.iter().find_map(|part| match part {
            Expr::Is(Restriction::Number(NumberField::State, NumberTest::Compare(Comparison::Equal, state))) => {
                Some(*state)
            }
            _ => None,
        });
        let query = terms::query(filter, dictionary);
        let terms_of_state = |query: Option<String>, index| {
            // The number of parts that the full-text index knows.
            let parts = conjuncts.iter().filter(|part| terms::query(part, dictionary).is_some());
            match query {
                Some(query) if parts.count() > 1 => Driver::Terms(query),
                _ => Driver::Index(index),
            }
        };
        let driver = match (state, query) {
            _ if has_id => Driver::Position,
            (None, None) => Driver::Time,
            (None, Some(query)) => Driver::Terms(query),
            (Some(state), _) if state != State::Open as i64 && rows_in_state(state)? <= FEW_ROWS => {
                Driver::Index("letters_by_state")
            }
            (Some(_), query) if has_text(TextField::Topic) => terms_of_state(query, "letters_by_topic_and_state"),
            (Some(_), query) if has_text(TextField::ErrorCode) => terms_of_state(query, "letters_by_state_and_code"),
            (Some(_), Some(query)) => Driver::Terms(query),
            (Some(_), None) => Driver::Index("letters_by_state"),
        };
        Ok(Self {
            driver,
            range: TimeRange::of(&conjuncts),
            condition: Condition::of(filter, dictionary),
        })
    }

    /// `FROM` and `WHERE`, with their parameters.
    pub(super) fn from(&self) -> (String, Vec<Value>) {
        // `CROSS JOIN` fixes the order of the tables. With `NOT INDEXED`, rows are still found by their number.
        let (table, column) = match &self.driver {
            Driver::Time => ("letters l NOT INDEXED", "l.row"),
            Driver::Terms(_) => ("terms CROSS JOIN letters l NOT INDEXED ON l.row = terms.rowid", "terms.rowid"),
            Driver::Index("letters_by_topic_and_state") => {
                ("letters l INDEXED BY letters_by_topic_and_state", "l.dead_at")
            }
            Driver::Index("letters_by_state_and_code") => {
                ("letters l INDEXED BY letters_by_state_and_code", "l.dead_at")
            }
            Driver::Index(_) => ("letters l INDEXED BY letters_by_state", "l.dead_at"),
            Driver::Position => ("letters l INDEXED BY letters_by_position", "l.dead_at"),
        };
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
        let TimeRange { from, to } = self.range;
        let range = match self.driver {
            Driver::Time | Driver::Terms(_) => {
                [row_key::first(Timestamp::from_millis(from)), row_key::last(Timestamp::from_millis(to))]
            }
            Driver::Index(_) | Driver::Position => [from, to],
        };
        params.extend(range.map(Value::Integer));
        params.extend(super::query::values(&self.condition.params));
        let sql = format!(
            "FROM {table}{bodies} WHERE {matched}{column} >= ? AND {column} <= ? AND {}",
            self.condition.sql
        );
        (sql, params)
    }

    /// The column that orders the rows: by `dead_at`, except within a bucket, see [`row_key`].
    pub(super) fn order(&self) -> &'static str {
        match self.driver {
            Driver::Time => "l.row",
            Driver::Terms(_) => "terms.rowid",
            Driver::Index(_) | Driver::Position => "l.dead_at",
        }
    }
}
