//! Requests of all kinds that keep coming until the chaos is over, so that whatever is killed is killed at work.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use redeliver_core::job::Priority;
use redeliver_core::{JobId, Timestamp};
use redeliver_kafka::murmur2::shard_of;

use crate::env::{APPS, SchedulerEnv, Watch, id};
use crate::oracle::{Asked, Verdict, Wanted, When, Wish};
use crate::requests::{Request, in_millis, now};

/// The most requests of one test; none should need so many.
const MOST: usize = 60_000;
/// How often some are written.
const BEAT: Duration = Duration::from_millis(50);
/// How far ahead jobs are due at most.
const AHEAD_MS: u64 = 5_000;

/// What the chaos sees of the load.
pub(crate) struct Load<'a> {
    watch: RefCell<Watch<'a>>,
}

impl Load<'_> {
    /// Waits until so many more jobs than now have ended: schedulers are at work.
    #[track_caller]
    pub(crate) fn until_more_ended(&self, more: usize) {
        let mut watch = self.watch.borrow_mut();
        let before = watch.look_at_state();
        watch.until_so_many_ended(before + more);
    }
}

/// All that was asked for.
pub(crate) struct Done<'a> {
    asked: Vec<Asked>,
    watch: Watch<'a>,
}

impl Done<'_> {
    /// Waits for the end of it all, on which the oracle's verdict must be clean; there must have been some of each
    /// kind.
    #[track_caller]
    pub(crate) fn settle(mut self) -> Verdict {
        let verdict = self.watch.settle(&mut self.asked);
        assert!(verdict.dispatched > 100, "{verdict}");
        let Verdict {
            cancelled,
            refused,
            conflicts,
            duplicates,
            forwarded,
            rescheduled,
            ..
        } = verdict;
        let all = [cancelled, refused, conflicts, duplicates, forwarded, rescheduled];
        assert!(all.iter().all(|count| *count > 0), "{verdict}");
        verdict
    }
}

/// Asks at this rate from before `chaos` begins until it is over.
pub(crate) fn under_load<'a>(
    env: &'a SchedulerEnv,
    random: &mut fastrand::Rng,
    per_second: u32,
    chaos: impl FnOnce(&Load<'_>, &mut fastrand::Rng),
) -> Done<'a> {
    let over = AtomicBool::new(false);
    let load = Load {
        watch: RefCell::new(env.watch()),
    };
    let asking = Asking::new(env, random.fork());
    let asked = thread::scope(|scope| {
        let asking = scope.spawn(|| asking.until(&over, per_second));
        {
            // Also when the chaos fails, else the failure would wait for the load.
            let _over = SetOnDrop(&over);
            load.until_more_ended(1);
            chaos(&load, random);
        }
        asking.join().unwrap()
    });
    assert!(asked.len() < MOST, "the load ended before the chaos did");
    Done {
        asked,
        watch: load.watch.into_inner(),
    }
}

struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Makes requests, and remembers some to come back to.
struct Asking<'a> {
    env: &'a SchedulerEnv,
    random: fastrand::Rng,
    number: usize,
    /// Jobs with idempotency keys, to be asked for again.
    keyed: VecDeque<Wanted>,
    /// Jobs to be cancelled or moved.
    ids: VecDeque<JobId>,
}

impl<'a> Asking<'a> {
    fn new(env: &'a SchedulerEnv, random: fastrand::Rng) -> Self {
        Self {
            env,
            random,
            number: 0,
            keyed: VecDeque::new(),
            ids: VecDeque::new(),
        }
    }

    fn until(mut self, over: &AtomicBool, per_second: u32) -> Vec<Asked> {
        let mut all = Vec::new();
        let began = Instant::now();
        while !over.load(Ordering::SeqCst) && all.len() < MOST {
            // After a pause, such as a broker that is down, what was missed is not made up for.
            let beat = usize::try_from(u128::from(per_second) * BEAT.as_millis() / 1000).unwrap();
            let requests = (0..beat.max(1)).map(|_| self.request()).collect();
            let asked = self.env.ask(requests);
            for asked in &asked {
                if matches!(asked.wish, Wish::Job(_)) && self.random.u32(..8) == 0 {
                    self.ids.push_back(id(asked));
                }
            }
            all.extend(asked);
            thread::sleep(BEAT);
        }
        println!("{} requests in {:.1} s", all.len(), began.elapsed().as_secs_f64());
        all
    }

    fn request(&mut self) -> Request {
        self.number += 1;
        match self.random.u32(..100) {
            0..4 => self.bad(),
            4..12 => match self.recent() {
                Some(id) => self.command(id),
                None => self.job(),
            },
            12..18 => match self.keyed.pop_front() {
                Some(wanted) => self.again(wanted),
                None => self.job(),
            },
            _ => self.job(),
        }
    }

    /// One of the latest jobs, or of all.
    fn recent(&mut self) -> Option<JobId> {
        if self.random.u32(..4) == 0 {
            self.ids.pop_front()
        } else {
            self.ids.pop_back()
        }
    }

    fn job(&mut self) -> Request {
        let n = self.number;
        let random = &mut self.random;
        let app = APPS[random.usize(..APPS.len())];
        let is_json = random.bool();
        let mut value = format!("{{\"job\" : {n}, \"text\":\"\\u00e9\"}}").into_bytes();
        if !is_json {
            value.extend([0xff, 0x00]);
        }
        if n.is_multiple_of(100) && !is_json {
            value.resize(20_000, b'x');
        }
        let wanted = Wanted::new(app, value);
        let mut wanted = match random.u32(..10) {
            0 => wanted,
            1 => wanted.at(Timestamp::from_millis(now().as_millis() - 1_000)),
            2..6 => wanted.after(random.u64(..AHEAD_MS)),
            _ => wanted.at(in_millis(random.u64(..AHEAD_MS))),
        };
        wanted.priority = [Priority::High, Priority::Normal, Priority::Low][random.usize(..3)];
        if random.u32(..3) == 0 {
            wanted = wanted.key(format!("customer {}", n % 17));
        }
        if random.u32(..3) == 0 {
            let number = n.to_string();
            wanted = wanted
                .header("n", Some(number.as_bytes()))
                .header("n", None)
                .header("tenant", Some(b""));
        }
        if random.u32(..20) == 0 {
            // Some of these expire while nobody is there to dispatch them.
            wanted = wanted.expire_after([200, 60_000][random.usize(..2)]);
        }
        if random.u32(..3) == 0 {
            wanted = wanted.idempotency_key(format!("key {n}"));
            if random.u32(..4) == 0 {
                self.keyed.push_back(wanted.clone());
            }
        }
        let request = match random.bool() {
            _ if is_json => Request::json(wanted),
            true => Request::protobuf(wanted).answer_to(n.to_string()),
            false => Request::protobuf(wanted),
        };
        self.perhaps_elsewhere(request)
    }

    /// The same once more, or another with the same key.
    fn again(&mut self, mut wanted: Wanted) -> Request {
        if self.random.u32(..4) == 0 {
            wanted.headers.push("another", None);
        }
        if self.random.bool() {
            // And again later.
            self.keyed.push_back(wanted.clone());
        }
        wanted.request_id = Some(format!("again {}", self.number));
        let request = Request::protobuf(wanted).answer_to(self.number.to_string());
        self.perhaps_elsewhere(request)
    }

    /// Some clients do not know where a request belongs.
    fn perhaps_elsewhere(&mut self, request: Request) -> Request {
        let partitions = self.env.topics.partitions;
        let Wish::Job(wanted) = &request.wish else {
            return request;
        };
        match &wanted.idempotency_key {
            Some(key) if self.random.u32(..10) == 0 => {
                let home = shard_of(&wanted.app, key, partitions);
                request.partition((home + 1) % partitions)
            }
            _ => request,
        }
    }

    fn command(&mut self, id: JobId) -> Request {
        if self.random.u32(..3) == 0 {
            // And once more, which may be too late.
            self.ids.push_back(id);
        }
        let when = When::At(in_millis(self.random.u64(..AHEAD_MS)));
        let request = match self.random.u32(..4) {
            0 => Request::cancel_json(id),
            1 => Request::cancel(id).answer_to(self.number.to_string()),
            2 => Request::reschedule_json(id, when),
            _ => Request::reschedule(id, when).answer_to(self.number.to_string()),
        };
        if self.random.u32(..10) == 0 {
            let partitions = self.env.topics.partitions;
            return request.partition((id.shard() + 1) % partitions);
        }
        request
    }

    fn bad(&mut self) -> Request {
        match self.random.u32(..3) {
            0 => Request::refused(
                Some(br#"{"appName":"fax","delay":"1s","jobData":1}"#),
                "appName",
                "`appName`",
            ),
            1 => Request::refused(Some(br#"{"appName":"sms","delay":"1s"}"#), "jobData", "`jobData`"),
            _ => Request::refused(Some(b"{"), "json", "not a JSON object"),
        }
    }
}
