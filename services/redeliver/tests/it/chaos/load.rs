//! Records that keep coming until the chaos is over, so that whatever is killed is killed at work.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use redeliver_testkit::eventually;

use crate::support::{Pipe, Sent, Watch, records};

/// The most records of one test; none should need so many.
const MOST: usize = 20_000;
/// How often some are written.
const BEAT: Duration = Duration::from_millis(50);
/// How long a number of records may take to end while the chaos goes on.
const PATIENCE: Duration = Duration::from_secs(60);

/// What the chaos sees of the load.
pub(crate) struct Load {
    ends: RefCell<Watch>,
}

impl Load {
    /// Waits until so many more records than now have ended: the services are at work.
    #[track_caller]
    pub(crate) fn until_ended(&self, more: usize) {
        let mut ends = self.ends.borrow_mut();
        let before = ends.look().len();
        eventually("records end", PATIENCE, || {
            let ended = ends.look().len() - before;
            if ended >= more {
                Ok(())
            } else {
                Err(format!("{ended} of {more} more, after {before}"))
            }
        });
    }
}

/// Produces at this rate from before `chaos` begins until it is over; says what was produced.
pub(crate) fn under_load(pipe: &Pipe, per_second: u32, chaos: impl FnOnce(&Load)) -> Vec<Sent> {
    let over = AtomicBool::new(false);
    let load = Load {
        ends: RefCell::new(pipe.watch()),
    };
    thread::scope(|scope| {
        let producing = scope.spawn(|| produce_until(&over, pipe, per_second));
        {
            // Also when the chaos fails, else the failure would wait for the load.
            let _over = SetOnDrop(&over);
            load.until_ended(1);
            chaos(&load);
        }
        let sent = producing.join().unwrap();
        assert!(sent.len() < MOST, "the load ended before the chaos did");
        sent
    })
}

struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

fn produce_until(over: &AtomicBool, pipe: &Pipe, per_second: u32) -> Vec<Sent> {
    let mut drafts = records(MOST);
    drafts.reverse();
    let mut sent = Vec::new();
    let began = Instant::now();
    while !over.load(Ordering::SeqCst) && !drafts.is_empty() {
        // After a pause, such as a broker that is down, what was missed is not made up for.
        let beat = usize::try_from(u128::from(per_second) * BEAT.as_millis() / 1000).unwrap();
        let rest = drafts.len().saturating_sub(beat.max(1));
        let batch = drafts.drain(rest..).rev().collect();
        sent.extend(pipe.produce(batch));
        thread::sleep(BEAT);
    }
    println!("{} records in {:.1} s", sent.len(), began.elapsed().as_secs_f64());
    sent
}
