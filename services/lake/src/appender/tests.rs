use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

use proptest::prelude::*;

use super::*;

/// A log that several writers share, as in an object store.
#[derive(Default)]
struct Log {
    /// The rows and positions of each commit.
    commits: Vec<(Vec<i64>, Vec<Move>)>,
    /// Commits whose requests arrive later: after this many further calls.
    late: Vec<(usize, usize, Vec<i64>, Vec<Move>)>,
}

/// What happens to a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    None,
    /// The request does not arrive.
    Lost,
    /// The request arrives, and its answer does not.
    Unanswered,
    /// As `Unanswered`, but the request arrives later.
    Late,
    /// The log cannot be read.
    Unreadable,
}

struct Fake {
    log: Rc<RefCell<Log>>,
    faults: Rc<RefCell<VecDeque<Fault>>>,
}

impl Fake {
    /// The fault of this call. Late requests arrive before it.
    fn fault(&self) -> Fault {
        let mut log = self.log.borrow_mut();
        let (mut arrived, mut late) = (Vec::new(), Vec::new());
        for (wait, at, rows, moves) in std::mem::take(&mut log.late) {
            if wait == 0 {
                arrived.push((at, rows, moves));
            } else {
                late.push((wait - 1, at, rows, moves));
            }
        }
        log.late = late;
        for (at, rows, moves) in arrived {
            if log.commits.len() == at {
                log.commits.push((rows, moves));
            }
        }
        self.faults.borrow_mut().pop_front().unwrap_or(Fault::None)
    }
}

impl Table for Fake {
    type Snapshot = usize;
    type Rows = Vec<i64>;
    type File = Vec<i64>;
    type Error = Fault;

    fn refresh(&self, _: &usize) -> Result<usize, Fault> {
        match self.fault() {
            Fault::Unreadable => Err(Fault::Unreadable),
            _ => Ok(self.log.borrow().commits.len()),
        }
    }

    fn position(&self, snapshot: &usize, id: &str) -> Result<Option<i64>, Fault> {
        let log = self.log.borrow();
        let mut moves = log.commits[..*snapshot].iter().flat_map(|(_, moves)| moves).rev();
        Ok(moves.find(|moved| moved.id == id).map(|moved| moved.to))
    }

    fn write(&self, _: &usize, rows: &Vec<i64>) -> Result<Vec<i64>, Fault> {
        match self.fault() {
            fault @ (Fault::Lost | Fault::Unanswered | Fault::Late) => Err(fault),
            Fault::None | Fault::Unreadable => Ok(rows.clone()),
        }
    }

    fn is_abandoned(&self, _: &Vec<i64>) -> bool {
        false
    }

    fn commit(&self, snapshot: &usize, file: Option<&Vec<i64>>, moves: &[Move]) -> Commit<usize, Fault> {
        let fault = self.fault();
        let rows = file.cloned().unwrap_or_default();
        let mut log = self.log.borrow_mut();
        match fault {
            Fault::Lost => Commit::Unknown(fault),
            Fault::Late => {
                log.late.push((2, *snapshot, rows, moves.to_vec()));
                Commit::Unknown(fault)
            }
            _ if log.commits.len() != *snapshot => Commit::Conflict,
            _ => {
                log.commits.push((rows, moves.to_vec()));
                match fault {
                    Fault::Unanswered => Commit::Unknown(fault),
                    _ => Commit::Done(snapshot + 1),
                }
            }
        }
    }
}

/// A process that appends the offsets of partitions, from the positions of the table.
struct Writer {
    appender: Appender<Fake>,
    faults: Rc<RefCell<VecDeque<Fault>>>,
}

impl Writer {
    fn start(log: &Rc<RefCell<Log>>) -> Self {
        let faults = Rc::default();
        let table = Fake {
            log: log.clone(),
            faults: Rc::clone(&faults),
        };
        let snapshot = log.borrow().commits.len();
        Self {
            appender: Appender::new(table, snapshot),
            faults,
        }
    }

    /// Appends up to `count` records of a partition with `end` records, or what is left.
    fn step(&mut self, partition: usize, end: i64, count: i64, faults: &[Fault]) {
        *self.faults.borrow_mut() = faults.iter().copied().collect();
        if self.appender.is_pending() {
            let _ = self.appender.resume();
            return;
        }
        let id = format!("p{partition}");
        let from = self.appender.position(&id).unwrap();
        let first = from.unwrap_or(0);
        let to = end.min(first + count);
        if first < to {
            // The partition is a part of the row, so that the rows of all partitions differ.
            let rows = (first..to).map(|offset| offset * 10 + partition as i64).collect();
            let _ = self.appender.append(Some(rows), vec![Move { id, from, to }]);
        }
    }
}

fn fault() -> impl Strategy<Value = Fault> {
    prop_oneof![
        4 => Just(Fault::None),
        1 => Just(Fault::Lost),
        1 => Just(Fault::Unanswered),
        1 => Just(Fault::Late),
        1 => Just(Fault::Unreadable),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    /// Two processes that should be one append the same partitions, crash, and get no or late answers.
    #[test]
    fn each_row_is_appended_once(
        steps in proptest::collection::vec(
            (0..2_usize, 0..2_usize, 1..5_i64, proptest::collection::vec(fault(), 0..4), proptest::bool::weighted(0.1)),
            1..60,
        ),
    ) {
        const END: i64 = 20;
        let log = Rc::new(RefCell::new(Log::default()));
        let mut writers = [Writer::start(&log), Writer::start(&log)];
        for (writer, partition, count, faults, crashes) in steps {
            if crashes {
                writers[writer] = Writer::start(&log);
            }
            writers[writer].step(partition, END, count, &faults);
        }
        // Without faults, everything arrives.
        for partition in [0, 1] {
            for _ in 0..60 {
                writers[0].step(partition, END, 5, &[]);
            }
        }
        let mut rows: Vec<i64> = log.borrow().commits.iter().flat_map(|(rows, _)| rows.clone()).collect();
        rows.sort_unstable();
        let expected: BTreeMap<i64, ()> = (0..END).flat_map(|offset| [(offset * 10, ()), (offset * 10 + 1, ())]).collect();
        prop_assert_eq!(rows, expected.into_keys().collect::<Vec<_>>());
    }
}

#[test]
fn unanswered_commit_is_recognised() {
    let log = Rc::new(RefCell::new(Log::default()));
    let mut writer = Writer::start(&log);
    writer.step(0, 10, 5, &[Fault::None, Fault::Unanswered]);
    assert!(!writer.appender.is_pending());
    assert_eq!(log.borrow().commits.len(), 1);
    assert_eq!(writer.appender.position("p0").unwrap(), Some(5));
}

#[test]
fn later_writer_overtakes_earlier_one() {
    let log = Rc::new(RefCell::new(Log::default()));
    let mut writers = [Writer::start(&log), Writer::start(&log)];
    writers[1].step(0, 10, 5, &[]);
    let moves = vec![Move {
        id: "p0".to_owned(),
        from: None,
        to: 3,
    }];
    let appended = writers[0].appender.append(Some(vec![0, 10, 20]), moves);
    assert_eq!(appended, Ok(Appended::Overtaken));
    assert_eq!(writers[0].appender.position("p0").unwrap(), Some(5));
}
