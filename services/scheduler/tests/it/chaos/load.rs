//! A load of requests of all kinds that lasts as long as the chaos, so that processes are killed while they work.

use std::cell::{RefCell, RefMut};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use redeliver_core::job::Priority;
use redeliver_core::{JobId, Timestamp};
use redeliver_kafka::murmur2::shard_of;

use crate::env::{APPS, SchedulerEnv, Watch, id};
use crate::oracle::{Intent, JobSpec, Report, Sent, When};
use crate::requests::{Request, distance, in_millis, noise, now};

/// The maximum number of requests of a test, which none should reach.
const MAX_REQUESTS: usize = 60_000;
/// The time between two batches.
const INTERVAL: Duration = Duration::from_millis(50);
/// The longest delay of a job.
const AHEAD_MS: u64 = 5_000;

/// The padding of a large job, in bytes. With all else, a job has at most `scheduler.max_data`.
const LARGE: Range<usize> = 1_000..899_500;

/// What a load sends.
#[derive(Clone, Copy)]
pub(crate) struct Volume {
    per_second: u32,
    /// How many of a hundred jobs have [`LARGE`] padding.
    large: u32,
}

impl Volume {
    /// So few requests that large jobs have about 3 MB per second.
    pub(crate) const LARGE: Self = Self {
        per_second: 100,
        large: 10,
    };
}

/// So many small requests per second.
impl From<u32> for Volume {
    fn from(per_second: u32) -> Self {
        Self { per_second, large: 0 }
    }
}

/// The load as the chaos sees it.
pub(crate) struct Load<'a> {
    watch: RefCell<Watch<'a>>,
}

impl<'a> Load<'a> {
    /// Waits until this many more jobs have ended, which means that schedulers are working.
    #[track_caller]
    pub(crate) fn until_more_ended(&self, more: usize) {
        let mut watch = self.watch.borrow_mut();
        let before = watch.look_at_state();
        watch.until_jobs_ended(before + more);
    }

    /// Changes the topics that are watched.
    pub(crate) fn watch(&self) -> RefMut<'_, Watch<'a>> {
        self.watch.borrow_mut()
    }
}

/// The requests of a finished load.
pub(crate) struct Done<'a> {
    sent: Vec<Sent>,
    watch: Watch<'a>,
}

impl Done<'_> {
    /// Waits until all requests have a final outcome. The report must be clean, and contain requests of each kind.
    #[track_caller]
    pub(crate) fn settle(mut self) -> Report {
        let report = self.watch.settle(&mut self.sent);
        assert!(report.dispatched > 100, "{report}");
        let Report {
            cancelled,
            refused,
            conflicts,
            duplicates,
            forwarded,
            rescheduled,
            replaced,
            late_duplicates,
            ..
        } = report;
        let is_single = self.watch.env().topics.partitions == 1;
        let all = [
            cancelled,
            refused,
            conflicts,
            duplicates,
            // There is no wrong partition to which a request could be sent.
            forwarded + usize::from(is_single),
            rescheduled,
            replaced,
            // A few large requests may have none.
            late_duplicates + usize::from(is_single),
        ];
        assert!(all.iter().all(|count| *count > 0), "{report}");
        report
    }
}

/// Sends requests from before `chaos` starts until it is over.
pub(crate) fn under_load<'a>(
    env: &'a SchedulerEnv,
    random: &mut fastrand::Rng,
    volume: impl Into<Volume>,
    chaos: impl FnOnce(&Load<'_>, &mut fastrand::Rng),
) -> Done<'a> {
    under_watched_load(env.watch(), random, volume, chaos)
}

/// The same with a watch of the test.
pub(crate) fn under_watched_load<'a>(
    watch: Watch<'a>,
    random: &mut fastrand::Rng,
    volume: impl Into<Volume>,
    chaos: impl FnOnce(&Load<'_>, &mut fastrand::Rng),
) -> Done<'a> {
    let env = watch.env();
    let load = Load {
        watch: RefCell::new(watch),
    };
    let generator = Generator::new(env, random.fork(), volume.into());
    let generate = |is_over: &AtomicBool| generator.run(is_over);
    let sent = redeliver_testkit::under_load(generate, || {
        load.until_more_ended(1);
        chaos(&load, random);
    });
    assert!(sent.len() < MAX_REQUESTS, "the load ended before the chaos did");
    Done {
        sent,
        watch: load.watch.into_inner(),
    }
}

/// Creates requests, and remembers some jobs for later commands.
struct Generator<'a> {
    env: &'a SchedulerEnv,
    random: fastrand::Rng,
    volume: Volume,
    /// What large jobs consist of. It cannot be compressed.
    noise: String,
    number: usize,
    /// Jobs with idempotency keys, to be requested again.
    keyed: Vec<JobSpec>,
    /// Jobs to be cancelled or rescheduled.
    ids: VecDeque<JobId>,
    /// The last request that replaces others, to be sent again.
    debounced: Option<JobSpec>,
}

impl<'a> Generator<'a> {
    fn new(env: &'a SchedulerEnv, mut random: fastrand::Rng, volume: Volume) -> Self {
        Self {
            env,
            noise: noise(&mut random, LARGE.end),
            random,
            volume,
            number: 0,
            keyed: Vec::new(),
            ids: VecDeque::new(),
            debounced: None,
        }
    }

    fn run(mut self, is_over: &AtomicBool) -> Vec<Sent> {
        let mut all = Vec::new();
        let began = Instant::now();
        while !is_over.load(Ordering::SeqCst) && all.len() < MAX_REQUESTS {
            // After an interruption, such as a broker that is down, the missed requests are not sent in a burst.
            let batch =
                usize::try_from(u128::from(self.volume.per_second) * INTERVAL.as_millis() / 1000).unwrap();
            let requests = (0..batch.max(1)).map(|_| self.request()).collect();
            let sent = self.env.send(requests);
            for sent in &sent {
                if matches!(sent.intent, Intent::Job(_)) && self.random.u32(..8) == 0 {
                    self.ids.push_back(id(sent));
                }
            }
            all.extend(sent);
            thread::sleep(INTERVAL);
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
            12..20 => self.debounced(),
            20..30 if !self.keyed.is_empty() => self.again(),
            _ => self.job(),
        }
    }

    /// The latest or the oldest remembered job.
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
        let padding = match random.u32(..100) < self.volume.large {
            true => &self.noise[..random.usize(LARGE)],
            false => "",
        };
        let mut value = format!("{{\"job\" : {n}, \"text\":\"\\u00e9{padding}\"}}").into_bytes();
        if !is_json {
            value.extend([0xff, 0x00]);
        }
        if n.is_multiple_of(100) && !is_json && padding.is_empty() {
            value.resize(20_000, b'x');
        }
        let spec = JobSpec::new(app, value);
        let mut spec = match random.u32(..10) {
            0 => spec,
            1 => spec.at(Timestamp::from_millis(now().as_millis() - 1_000)),
            2..6 => spec.after(random.u64(..AHEAD_MS)),
            _ => spec.at(in_millis(random.u64(..AHEAD_MS))),
        };
        spec.priority = [Priority::High, Priority::Normal, Priority::Low][random.usize(..3)];
        if random.u32(..3) == 0 {
            spec = spec.key(format!("customer {}", n % 17));
        }
        if random.u32(..3) == 0 {
            let number = n.to_string();
            spec = spec
                .header("n", Some(number.as_bytes()))
                .header("n", None)
                .header("tenant", Some(b""));
        }
        if random.u32(..20) == 0 {
            // Some of these expire while no scheduler is running.
            spec = spec.expire_after([200, 60_000][random.usize(..2)]);
        }
        if random.u32(..3) == 0 {
            spec = spec.idempotency_key(format!("key {n}"));
            self.keyed.push(spec.clone());
        }
        let request = match random.bool() {
            _ if is_json => Request::json(spec),
            true => Request::protobuf(spec).answer_to(n.to_string()),
            false => Request::protobuf(spec),
        };
        self.maybe_misplaced(request)
    }

    /// A request that replaces others with one of a few keys, or the same one again.
    fn debounced(&mut self) -> Request {
        if let Some(spec) = self.debounced.take()
            && self.random.u32(..4) == 0
        {
            return self.maybe_misplaced(Request::protobuf(spec).answer_to(self.number.to_string()));
        }
        let random = &mut self.random;
        let key = random.usize(..40);
        let spec = JobSpec::new(APPS[key % APPS.len()], format!("{{\"event\":{}}}", self.number));
        let ahead = random.u64(..AHEAD_MS);
        let mut spec = match random.bool() {
            true => spec.after(ahead),
            false => spec.at(in_millis(ahead)),
        };
        spec.priority = [Priority::Normal, Priority::High][usize::from(random.u32(..5) == 0)];
        if random.bool() {
            spec.request_id = Some(format!("event {}", self.number));
        }
        let spec = spec.idempotency_key(format!("debounced {key}")).replaces();
        self.debounced = Some(spec.clone());
        let request = match self.random.bool() {
            true => Request::json(spec),
            false => Request::protobuf(spec).answer_to(self.number.to_string()),
        };
        self.maybe_misplaced(request)
    }

    /// An earlier job again, or another one with the same key.
    fn again(&mut self) -> Request {
        let back = distance(&mut self.random, self.keyed.len());
        let mut spec = self.keyed[self.keyed.len() - 1 - back].clone();
        if self.random.u32(..4) == 0 {
            spec.headers.push("another", None);
        }
        spec.request_id = Some(format!("again {}", self.number));
        let request = Request::protobuf(spec).answer_to(self.number.to_string());
        self.maybe_misplaced(request)
    }

    /// Sends some requests to a wrong partition, as a client with another partitioner would.
    fn maybe_misplaced(&mut self, request: Request) -> Request {
        let partitions = self.env.topics.partitions;
        let Intent::Job(spec) = &request.intent else {
            return request;
        };
        match &spec.idempotency_key {
            Some(key) if self.random.u32(..10) == 0 => {
                let home = shard_of(&spec.app, key, partitions);
                request.partition((home + 1) % partitions)
            }
            _ => request,
        }
    }

    fn command(&mut self, id: JobId) -> Request {
        if self.random.u32(..3) == 0 {
            // A second command may be too late.
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
