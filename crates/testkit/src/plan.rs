//! The fate of each record at the fake endpoint, which depends on the record's body alone. The endpoint and the checks of a
//! test use the same pure function, so the expected result is known even if processes were killed and calls repeated.

use std::time::Duration;

use crate::fake_endpoint::{Reply, Request};
use crate::hash::stable_hash;

/// The shares of records that fail; the rest succeed on the first call. The shares are of distinct records: two records
/// with the same body share their fate and their number of calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Per hundred: fail with 503 on the first one or two calls, then succeed.
    pub transient_percent: u32,
    /// Per hundred: fail with 422 on every call.
    pub permanent_percent: u32,
    /// Per thousand: the first call is never answered, later ones succeed.
    pub hang_per_mille: u32,
    /// Per thousand: on the first call the connection is closed without an answer, later ones succeed.
    pub close_per_mille: u32,
    /// The delay of a successful response.
    pub latency: Duration,
}

/// The expected outcome of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// Success on the first call.
    Succeeds,
    /// Failure of the first `failures` calls, then success.
    Recovers {
        /// How many calls fail; at least one.
        failures: u32,
        /// How they fail.
        trouble: Trouble,
    },
    /// 422 on every call: the record becomes a dead letter.
    Refused,
}

/// A transient failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// The response is 503.
    Unavailable,
    /// There is no response.
    Hang,
    /// The connection is closed without a response.
    Close,
}

impl Plan {
    /// The fate of the record with this body, the same on every machine and in every run.
    ///
    /// # Panics
    /// If the shares exceed 100%.
    pub fn fate(&self, body: &[u8]) -> Fate {
        let hash = stable_hash(body);
        let shares = [
            (
                self.hang_per_mille,
                Fate::Recovers {
                    failures: 1,
                    trouble: Trouble::Hang,
                },
            ),
            (
                self.close_per_mille,
                Fate::Recovers {
                    failures: 1,
                    trouble: Trouble::Close,
                },
            ),
            (self.permanent_percent * 10, Fate::Refused),
            (
                self.transient_percent * 10,
                // From a bit that does not affect `draw`.
                Fate::Recovers {
                    failures: if hash >> 63 == 0 { 1 } else { 2 },
                    trouble: Trouble::Unavailable,
                },
            ),
        ];
        let sum: u32 = shares.iter().map(|(share, _)| share).sum();
        assert!(
            sum <= 1000,
            "the shares of {self:?} sum up to more than all records"
        );
        let mut draw = hash % 1000;
        for (share, fate) in shares {
            match draw.checked_sub(u64::from(share)) {
                None => return fate,
                Some(rest) => draw = rest,
            }
        }
        Fate::Succeeds
    }

    /// The reply of the endpoint; a success echoes the request.
    pub fn reply(&self, request: &Request) -> Reply {
        let success = || {
            let echo = Reply::ok(request.body.clone());
            if self.latency.is_zero() {
                echo
            } else {
                Reply::Delay(self.latency, Box::new(echo))
            }
        };
        match self.fate(&request.body) {
            Fate::Refused => Reply::status(422),
            Fate::Recovers { failures, trouble } if request.earlier_calls_of_body < failures => match trouble
            {
                Trouble::Unavailable => Reply::status(503),
                Trouble::Hang => Reply::Hang,
                Trouble::Close => Reply::Close,
            },
            Fate::Succeeds | Fate::Recovers { .. } => success(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAN: Plan = Plan {
        transient_percent: 20,
        permanent_percent: 5,
        hang_per_mille: 10,
        close_per_mille: 15,
        latency: Duration::ZERO,
    };

    fn share(of: impl Fn(Fate) -> bool) -> usize {
        (0..100_000)
            .filter(|n| of(PLAN.fate(format!("order-{n}").as_bytes())))
            .count()
    }

    #[test]
    fn shares_are_as_configured() {
        let by = |wanted| share(|fate| matches!(fate, Fate::Recovers { trouble, .. } if trouble == wanted));
        assert!((19_000..21_000).contains(&by(Trouble::Unavailable)));
        assert!((800..1_200).contains(&by(Trouble::Hang)));
        assert!((1_300..1_700).contains(&by(Trouble::Close)));
        assert!((4_700..5_300).contains(&share(|fate| fate == Fate::Refused)));
        let twice = share(|fate| matches!(fate, Fate::Recovers { failures: 2, .. }));
        assert!(
            (9_500..10_500).contains(&twice),
            "half of the transient ones fail twice: {twice}"
        );
    }

    #[test]
    fn transient_record_fails_as_planned() {
        let plan = Plan {
            transient_percent: 100,
            ..Plan::default()
        };
        let Fate::Recovers {
            failures,
            trouble: Trouble::Unavailable,
        } = plan.fate(b"order")
        else {
            panic!("all records are transient")
        };
        let reply = |earlier| plan.reply(&Request::example(b"order", earlier));
        for earlier in 0..failures {
            assert_eq!(reply(earlier), Reply::status(503));
        }
        assert_eq!(reply(failures), Reply::ok("order"));
    }
}
