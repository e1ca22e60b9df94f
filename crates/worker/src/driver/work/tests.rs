use std::sync::Arc;

use proptest::prelude::*;
use redeliver_kafka::Processor;

use super::*;
use crate::engine::tests::{Bench, ROOMY};
use crate::groups::{Group, GroupBy, GroupLimit};

const LANES: usize = 2;

/// What happens to a record after an attempt.
#[derive(Clone, Copy, Debug)]
enum After {
    Final,
    Forgotten,
    Blocks,
}

#[derive(Clone, Copy, Debug)]
enum Op {
    Arrive {
        lane: usize,
    },
    Start {
        order: Order,
    },
    End {
        which: usize,
        after: After,
    },
    /// Blocking records are due.
    Unblock,
    GiveBack {
        lane: usize,
    },
    Revoke,
}

fn ops() -> impl Strategy<Value = Op> {
    let after = prop_oneof![
        4 => Just(After::Final),
        2 => Just(After::Forgotten),
        1 => Just(After::Blocks),
    ];
    prop_oneof![
        8 => (0..LANES).prop_map(|lane| Op::Arrive { lane }),
        8 => any::<(bool, bool)>().prop_map(|(forgotten_first, retries_first)| Op::Start {
            order: Order { forgotten_first, retries_first },
        }),
        6 => (any::<usize>(), after).prop_map(|(which, after)| Op::End { which, after }),
        2 => Just(Op::Unblock),
        3 => (0..LANES).prop_map(|lane| Op::GiveBack { lane }),
        1 => Just(Op::Revoke),
    ]
}

/// The records of a driver whose attempts end when the test says so.
struct Model {
    bench: Bench,
    work: Work,
    running: Vec<OfLane<QueuedRecord>>,
    /// Key, tenant and whether it has had an attempt, by offset.
    records: Vec<(u8, u8, bool)>,
    ended: usize,
    limit: usize,
}

impl Model {
    fn new(limit: usize) -> Self {
        let by = GroupBy::Key;
        let limit_by = Some(GroupLimit {
            by,
            concurrency: limit,
        });
        let grouping = crate::Grouping {
            limit: limit_by,
            ..crate::Grouping::default()
        };
        Self {
            bench: Bench::with_grouping(ROOMY, Arc::default()),
            work: Work::new(LANES, &grouping, 3),
            running: Vec::new(),
            records: Vec::new(),
            ended: 0,
            limit,
        }
    }

    fn arrive(&mut self, lane: usize, key: u8, tenant: u8) {
        self.bench.accept(i64::try_from(self.records.len()).unwrap(), 1);
        self.records.push((key, tenant, false));
        for mut record in self.bench.channel.take_queued() {
            let group = |name| Some(Group::Of(vec![name].into()));
            record.groups = GroupsOf {
                ordered: group(key),
                limited: group(tenant),
            };
            record.is_retry = lane == 1;
            self.work.arrive(OfLane { lane, record });
        }
    }

    fn of(&self, queued: &OfLane<QueuedRecord>) -> (u8, u8, bool) {
        self.records[usize::try_from(queued.record.offset).unwrap()]
    }

    /// Checks that no attempt runs that should wait.
    fn start(&mut self, order: Order) {
        let Some(next) = self.work.next(order) else {
            return;
        };
        let (key, tenant, _) = self.of(&next);
        let of_key = self.running.iter().filter(|running| self.of(running).0 == key);
        assert_eq!(of_key.count(), 0, "one at a time");
        let of_tenant = self.running.iter().filter(|running| self.of(running).1 == tenant);
        assert!(of_tenant.count() < self.limit);
        let offset = usize::try_from(next.record.offset).unwrap();
        // One that has started was the next of its key, so later ones have not.
        let later = &self.records[offset + 1..];
        let overtaken = later
            .iter()
            .any(|(other, _, has_started)| *other == key && *has_started);
        assert!(!overtaken, "{offset}");
        self.records[offset].2 = true;
        self.running.push(next);
    }

    fn end(&mut self, which: usize, after: After) {
        if self.running.is_empty() {
            return;
        }
        let queued = self.running.remove(which % self.running.len());
        self.work.end_attempt(&queued.record);
        match after {
            After::Final => {
                self.work.leave_order(&queued.record.groups);
                self.ended += 1;
            }
            After::Forgotten => {
                self.work.queue.push_forgotten(queued);
            }
            After::Blocks => self.work.blocking.push((Instant::now(), queued)),
        }
    }

    /// Every record is running, waits for something, or has ended.
    fn assert_waiting(&self) {
        let WaitingCounts {
            attempt,
            order,
            limit,
            held,
            forgotten,
            blocking,
        } = self.work.waiting();
        let waiting = attempt + order + limit + held + forgotten + blocking;
        let returned: usize = self.work.finished.iter().map(Vec::len).sum();
        assert_eq!(
            waiting + self.running.len() + self.ended + returned,
            self.records.len(),
            "{:?}",
            self.work.waiting()
        );
    }

    fn unblock(&mut self) {
        for (_, queued) in std::mem::take(&mut self.work.blocking) {
            self.work.repeat(queued);
        }
    }
}

#[test]
fn returned_record_leaves_its_place() {
    let mut model = Model::new(1);
    (0..3).for_each(|key| model.arrive(0, key, 0));
    model.start(Order::default());
    // Both others wait for the first one.
    model.start(Order::default());
    model.end(0, After::Final);
    model.work.give_back(|_, queued| queued.offset == 1);
    model.start(Order::default());
    let running: Vec<_> = model
        .running
        .iter()
        .map(|running| running.record.offset)
        .collect();
    assert_eq!(running, [2]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, ..ProptestConfig::default() })]

    /// Whatever happens when: no two attempts of a key overlap, those of a tenant do not exceed its limit, records of a key
    /// begin in their order, and each record ends once.
    #[test]
    fn order_and_limit_are_kept(
        limit in 1..4_usize,
        ops in proptest::collection::vec((ops(), 0..6_u8, 0..2_u8), 0..40),
    ) {
        let mut model = Model::new(limit);
        for (op, key, tenant) in ops {
            match op {
                Op::Arrive { lane } => model.arrive(lane, key, tenant),
                Op::Start { order } => model.start(order),
                Op::End { which, after } => model.end(which, after),
                Op::Unblock => model.unblock(),
                Op::GiveBack { lane } => model.work.give_back(|of, _| of == lane),
                // Those of all partitions are found when their turn comes.
                Op::Revoke => {
                    model.bench.engine.revoked(model.bench.assignment);
                    let source = model.bench.pipeline.source.clone();
                    model.bench.engine.assigned(model.bench.assignment, &source, 0);
                }
            }
            model.assert_waiting();
        }
        for _ in 0..model.records.len() {
            model.unblock();
            while !model.work.queue.is_empty() {
                model.start(Order::default());
            }
            while !model.running.is_empty() {
                model.end(0, After::Final);
            }
        }
        let returned: usize = model.work.finished.iter().map(Vec::len).sum();
        prop_assert_eq!(model.ended + returned, model.records.len());
        prop_assert!(model.work.ordered.is_empty() && model.work.limited.is_empty());
        prop_assert_eq!(model.work.waiting(), WaitingCounts::default());
        prop_assert_eq!(model.work.slots, 0);
    }
}
