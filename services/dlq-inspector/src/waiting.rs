//! The records of pipelines that wait for their next attempt, and the life of single records.
//!
//! Both are read from Kafka on demand: waiting records are many, and change all the time, so that an index of them would cost more than
//! it answers. Memory does not grow with their number.
//!
//! | module | responsibility |
//! |---|---|
//! | `facts` | what is read of a record, without what is masked; no IO |
//! | `counts` | counts of records; no IO |
//! | `page` | the records that are due first; no IO |
//! | `tally` | which records match, and what is known of them; no IO |
//! | `decision` | decisions about dead letters, from the ledger; no IO |
//! | `timeline` | the steps of a record's life from its copies; no IO |
//! | `wanted` | what records have a key, a header or a field, and which of their copies tells the most; no IO |
//! | `limit` | how many scans run at the same time |
//! | `scans` | reads the topics |

pub(crate) mod counts;
pub(crate) mod decision;
pub(crate) mod facts;
pub(crate) mod limit;
pub(crate) mod page;
pub(crate) mod scans;
pub(crate) mod tally;
pub(crate) mod timeline;
pub(crate) mod wanted;

use std::fmt;
use std::str::FromStr;

use redeliver_core::HumanDuration;
use redeliver_core::pipeline::TopicRole;

/// Where a record waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Place {
    /// In a tier.
    Tier(HumanDuration),
    /// With the scheduler.
    Scheduler,
    /// In the due topic, for a worker.
    Due,
}

impl Place {
    /// Where records wait that are in a topic with this role.
    pub(crate) fn of(role: TopicRole) -> Option<Self> {
        match role {
            TopicRole::Tier(tier) => Some(Self::Tier(tier)),
            TopicRole::Due => Some(Self::Due),
            TopicRole::Source | TopicRole::Output | TopicRole::DeadLetter => None,
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tier(tier) => tier.fmt(f),
            Self::Scheduler => f.write_str("scheduler"),
            Self::Due => f.write_str("due"),
        }
    }
}

/// The text is not a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NoPlace;

impl FromStr for Place {
    type Err = NoPlace;

    fn from_str(text: &str) -> Result<Self, NoPlace> {
        match text {
            "scheduler" => Ok(Self::Scheduler),
            "due" => Ok(Self::Due),
            tier => tier.parse().map(Self::Tier).map_err(|_| NoPlace),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn place_reads_as_written() {
        for text in ["due", "scheduler", "30s", "1m"] {
            assert_eq!(text.parse::<Place>().unwrap().to_string(), text);
        }
        assert_eq!("soon".parse::<Place>(), Err(NoPlace));
    }
}
