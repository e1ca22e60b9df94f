//! Plans the automatic redrives of pipelines: looks for candidates in the index, and writes jobs as a caller does.
//!
//! Each inspector that executes jobs plans. Those that plan at the same time write one job, see [`super::automatic`].

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use redeliver_core::Clock;
use redeliver_core::error_chain::error_chain;
use redeliver_core::wait::LogThrottle;
use redeliver_runtime::Config;
use redeliver_service::audit::Author;
use redeliver_service::followed::Followed;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::automatic::{AUTHOR, Rule, Selection, Standing};
use super::change::{Change, ChangeError, ChangeRequest, JobWriter};
use super::job::Job;
use super::jobs::Jobs;
use super::record::Destinations;
use crate::completeness::Completeness;
use crate::filter::{self, Comparison, Expr, NumberField, NumberTest, Restriction};
use crate::index::{self, Cursor, Direction, IndexedLetter, Page, PageLimit, Pool};
use crate::ledger::State;
use crate::metrics::Metrics;
use crate::shared::SharedState;

/// How often to look whether the last job of a pipeline has ended.
const TICK: Duration = Duration::from_secs(1);
/// The time before the next attempt after a problem.
const RETRY: Duration = Duration::from_secs(5);
/// How many dead letters are read from the index at once.
const PAGE: PageLimit = PageLimit {
    letters: 1_000,
    bytes: 4 << 20,
};

/// The task.
pub(crate) struct Planner {
    pub(crate) rules: Vec<Rule>,
    pub(crate) jobs: Followed<Jobs>,
    pub(crate) writer: JobWriter,
    pub(crate) destinations: Arc<Destinations>,
    pub(crate) pool: Pool,
    pub(crate) shared: Arc<SharedState>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) metrics: Metrics,
}

/// Why no job was planned.
#[derive(Debug, thiserror::Error)]
enum Problem {
    #[error("the index is incomplete, so that dead letters or their states may be unknown")]
    Incomplete,
    #[error("reading the index")]
    Index(#[from] index::ReadError),
    #[error("writing the job: {}", refusal(.0))]
    Write(ChangeError),
    #[error("the filter of the pipeline {0}")]
    Filter(filter::FilterError),
}

/// A refusal, or the failure of Kafka.
fn refusal(error: &ChangeError) -> String {
    match error {
        ChangeError::Refused(refused) => format!("{refused:?}"),
        other => error_chain(other),
    }
}

/// When to look for dead letters of a pipeline again, and why it was not possible at the last attempt.
struct NextLook {
    at: Instant,
    is_waiting: bool,
}

impl NextLook {
    fn after(delay: Duration, is_waiting: bool) -> Self {
        Self {
            at: Instant::now() + delay,
            is_waiting,
        }
    }
}

/// How the automatic redrive of a pipeline stands that cannot look for dead letters.
const WAITING: &str = "waiting";

/// The rules of a configuration.
pub(crate) fn rules(config: &Config) -> Vec<Rule> {
    let automatic = config.automatic_redrives().into_iter();
    let rules = automatic.map(|(pipeline, settings)| Rule {
        pipeline: pipeline.name.to_string(),
        topic: pipeline.dead_letter_topic().to_string(),
        settings: settings.clone(),
    });
    rules.collect()
}

impl Planner {
    /// Plans until shutdown.
    pub(crate) async fn run(self, stop: CancellationToken) -> Result<(), Infallible> {
        let mut looks: Vec<NextLook> = self
            .rules
            .iter()
            .map(|_| NextLook::after(Duration::ZERO, false))
            .collect();
        let mut log = LogThrottle::default();
        while !stop.is_cancelled() {
            for (rule, look) in self.rules.iter().zip(&mut looks) {
                let planned = tokio::select! {
                    planned = self.plan(rule, look) => planned,
                    () = stop.cancelled() => return Ok(()),
                };
                let standing = planned.unwrap_or_else(|problem| {
                    if log.should_log() {
                        let (pipeline, reason) = (&rule.pipeline, error_chain(&problem));
                        match problem {
                            // As after each start.
                            Problem::Incomplete => {
                                tracing::info!(pipeline, reason, "no automatic redrive is planned yet");
                            }
                            _ => {
                                tracing::warn!(pipeline, reason, "no automatic redrive is planned; retrying");
                            }
                        }
                    }
                    *look = NextLook::after(RETRY, true);
                    WAITING
                });
                self.metrics.set_automatic_redrive(&rule.pipeline, standing);
            }
            tokio::select! {
                () = tokio::time::sleep(TICK) => {}
                () = stop.cancelled() => {}
            }
        }
        Ok(())
    }

    /// Plans the next job of a pipeline if it is time, and returns how its automatic redrive stands.
    async fn plan(&self, rule: &Rule, look: &mut NextLook) -> Result<&'static str, Problem> {
        let Some(jobs) = self.jobs.contents() else {
            // The topic does not exist, or was not read yet.
            return Ok(WAITING);
        };
        let standing = Standing::of(&rule.pipeline, &jobs);
        let Standing::Idle(last) = &standing else {
            return Ok(standing.name());
        };
        if Instant::now() < look.at {
            return Ok(if look.is_waiting { WAITING } else { standing.name() });
        }
        let Some(change) = self.change(rule, last.as_deref(), &jobs).await? else {
            *look = NextLook::after(rule.settings.every.duration(), false);
            return Ok(standing.name());
        };
        let request = ChangeRequest {
            change,
            by: Author {
                name: AUTHOR.into(),
                is_anonymous: false,
            },
            at: Rule::plan_at(last.as_deref(), self.clock.now()),
        };
        // The next look is when this job has ended.
        self.writer.change(request).await.map_err(Problem::Write)?;
        Ok(Standing::Running.name())
    }

    /// The next job; `None` if there is nothing to do.
    async fn change(&self, rule: &Rule, last: Option<&Job>, jobs: &Jobs) -> Result<Option<Change>, Problem> {
        let before = self.shared.completeness();
        self.check(rule, &before)?;
        let now = self.clock.now();
        let filter = rule.filter(now);
        let state = NumberTest::Compare(Comparison::Equal, State::Open as i64);
        let open = Expr::Is(Restriction::Number(NumberField::State, state));
        let matching = filter::parse(&filter, &[]).map_err(Problem::Filter)?;
        let matching = Arc::new(Expr::And(vec![matching, open]));
        let mut selection = Selection::new(rule, &self.destinations, jobs);
        let mut after: Option<Cursor> = None;
        loop {
            let matching = matching.clone();
            let listing = self.pool.query(move |connection| {
                index::list(connection, &matching, Direction::Ascending, after, PAGE)
            });
            let Page { letters, has_more } = listing.await?;
            letters.iter().for_each(|letter| selection.add(letter));
            after = letters.last().map(IndexedLetter::cursor);
            if !has_more || after.is_none() || selection.is_full() {
                break;
            }
        }
        self.check(rule, &before.and(&self.shared.completeness()))?;
        let next = selection.job(last, &filter);
        Ok(next.map(|(record, items)| Change::Plan(Box::new(record), items.into())))
    }

    /// A dead letter whose state is unknown could have been redriven.
    fn check(&self, rule: &Rule, known: &Completeness) -> Result<(), Problem> {
        let of_topic = known.of_topics(|topic| topic == rule.topic);
        let is_complete = of_topic.to_message(self.clock.now()).complete && known.are_states_known();
        is_complete.then_some(()).ok_or(Problem::Incomplete)
    }
}
