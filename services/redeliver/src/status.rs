//! `redeliver status`: the whole system on one screen. Kafka knows what waits; the inspector and the scheduler, if they can
//! be reached, know dead letters and jobs.

use std::fmt::Write as _;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use redeliver_client::convert::time;
use redeliver_client::messages::{Completeness, DeadLetterStats, Stats, TopicStats};
use redeliver_client::{DeadLetterClient, JobClient, Timestamp};
use redeliver_core::error_chain::error_chain;
use redeliver_core::{Clock as _, SystemClock};
use redeliver_kafka::groups::members;
use redeliver_kafka::topology;
use redeliver_runtime::cli::EXIT_FAILURE;
use redeliver_service::host::check_kafka;
use redeliver_service::login::kafka_of_command;
use redeliver_service::queues::{self, Waiting};
use serde_json::json;

use crate::config::Config;
use crate::connection::{CliError, ServicesArgs, conclude};
use crate::dlq::{open, problem, removed_in, stats_json};
use crate::obstacles::{COLUMNS as OBSTACLES, Obstacle, of_inspector, of_scheduler};
use crate::output::{
    Column, Json, OutputArgs, Text as _, due, fields, in_one_line, object, print_item, rounded, table,
    table_of,
};

#[derive(Args)]
pub(crate) struct StatusArgs {
    #[command(flatten)]
    output: OutputArgs,
    #[command(flatten)]
    services: ServicesArgs,
}

pub(crate) fn main(args: &StatusArgs) -> ExitCode {
    let config: Config = match args.services.common.configure(|config| check_kafka(config)) {
        Ok(config) => config,
        Err(code) => return code,
    };
    conclude(async {
        let queues = queues(&config, args.services.timeout()).await;
        let (dead, mut obstacles) = dead_letters(&config, args).await;
        let (jobs, of_jobs) = jobs(&config, args).await;
        obstacles.extend(of_jobs);
        let status = Status {
            queues,
            dead,
            jobs,
            obstacles,
        };
        let now = SystemClock.now();
        print_item(args.output.format, || status.text(now), || status.json(now));
        let is_whole = status.queues.as_ref().is_ok_and(|queues| {
            let mut configured = queues.iter().filter(|queue| queue.read.is_configured);
            configured.all(|queue| queue.waiting.unreachable.is_empty())
        });
        Ok(ExitCode::from(if is_whole { 0 } else { EXIT_FAILURE }))
    })
}

struct Status {
    queues: Result<Vec<Queue>, CliError>,
    dead: Result<DeadLetterStats, CliError>,
    /// `None` if the configuration needs no scheduler.
    jobs: Option<Result<Stats, CliError>>,
    obstacles: Vec<Obstacle>,
}

/// A topic that a service reads.
struct Queue {
    read: queues::Queue,
    /// The number of consumers in the group; `None` if a broker does not tell.
    members: Option<usize>,
    waiting: Waiting,
}

impl Queue {
    fn row(&self, now: Timestamp) -> Vec<String> {
        let Self { read, waiting, .. } = self;
        let backlog = waiting.backlog;
        let bound = match backlog.is_exact && read.is_configured {
            true => "",
            false if waiting.unreachable.is_empty() => "≤ ",
            false => "≈ ",
        };
        let overdue = waiting.due_at(now).map(|due| {
            // Only the first records were read.
            let bound = if backlog.is_exact { "" } else { "≥ " };
            format!("{bound}{due}")
        });
        let next = match waiting.earliest() {
            Some(_) if waiting.next_due(now).is_none() => "unknown".text(),
            earliest => due(earliest, now),
        };
        vec![
            match &read.pipeline {
                Some(pipeline) if !read.is_configured => format!("{pipeline} (not configured)"),
                Some(pipeline) => pipeline.to_string(),
                None => "(scheduler)".to_owned(),
            },
            read.topic.to_string(),
            format!("{bound}{}", backlog.records),
            overdue.unwrap_or_default(),
            next.unwrap_or_default(),
            match self.members {
                None => "unknown".to_owned(),
                Some(0) => "none".to_owned(),
                Some(members) => members.to_string(),
            },
        ]
    }

    fn json(&self, now: Timestamp) -> Json {
        let Self { read, waiting, .. } = self;
        let backlog = waiting.backlog;
        json!({
            "pipeline": read.pipeline.as_deref(),
            "configured": read.is_configured,
            "topic": &*read.topic,
            "group": read.group,
            "consumers": self.members,
            "records": backlog.records,
            "records_is_exact": backlog.is_exact && read.is_configured,
            "unreachable_partitions": waiting.unreachable,
            "due": waiting.due_at(now),
            "next_due": waiting.earliest().map(|earliest| earliest.to_string()),
        })
    }
}

impl Status {
    fn text(&self, now: Timestamp) -> String {
        let columns = ["pipeline", "topic", "records", "due", "next", "consumers"];
        let mut text = match &self.queues {
            Ok(queues) => {
                let mut text = table(&columns, queues.iter().map(|queue| queue.row(now)));
                for queue in queues
                    .iter()
                    .filter(|queue| !queue.waiting.unreachable.is_empty())
                {
                    let partitions: Vec<String> =
                        queue.waiting.unreachable.iter().map(i32::to_string).collect();
                    let _ = write!(
                        text,
                        "\n{}: records may be missing in the counts, since the leaders of these partitions do not answer: {}",
                        queue.read.topic,
                        partitions.join(", ")
                    );
                }
                text
            }
            Err(error) => format!("topics: {}", in_one_line(&error_chain(error))),
        };
        text += "\n\n";
        match &self.dead {
            Ok(stats) => {
                text += &table_of(&DEAD, &stats.topics);
                if let Some(problem) = problem(&completeness(stats)) {
                    let _ = write!(text, "\ndead letters: {problem}");
                }
            }
            Err(error) => {
                let _ = write!(text, "dead letters: {}", in_one_line(&error_chain(error)));
            }
        }
        match &self.jobs {
            None => {}
            Some(Ok(jobs)) => {
                text += "\n\n";
                text += &fields(&[
                    ("jobs scheduled", &jobs.scheduled),
                    ("due", &jobs.due),
                    ("next due", &jobs.next_due),
                ]);
            }
            Some(Err(error)) => {
                let _ = write!(text, "\n\njobs: {}", in_one_line(&error_chain(error)));
            }
        }
        if !self.obstacles.is_empty() {
            text = format!("{}\n\n{}", text.trim_end(), table_of(&OBSTACLES, &self.obstacles));
        }
        text
    }

    fn json(&self, now: Timestamp) -> Json {
        let dead = match &self.dead {
            Ok(stats) => stats.topics.iter().map(stats_json).collect(),
            Err(error) => json!({ "error": error_chain(error) }),
        };
        let stats = self.dead.as_ref().ok();
        let completeness = stats.map(|stats| object(&completeness(stats)));
        let jobs = self.jobs.as_ref().map(|jobs| match jobs {
            Ok(jobs) => json!({
                "scheduled": jobs.scheduled,
                "due": jobs.due,
                "next_due": jobs.next_due.text(),
            }),
            Err(error) => json!({ "error": error_chain(error) }),
        });
        let queues = match &self.queues {
            Ok(queues) => queues.iter().map(|queue| queue.json(now)).collect(),
            Err(error) => json!({ "error": error_chain(error) }),
        };
        json!({
            "time": now.to_string(),
            "queues": queues,
            "dead_letters": dead,
            "dead_letters_completeness": completeness,
            "jobs": jobs,
            "obstacles": self.obstacles.iter().map(Obstacle::json).collect::<Vec<Json>>(),
        })
    }
}

const DEAD: [Column<TopicStats>; 5] = [
    ("dead letters", |topic, _| topic.topic.text()),
    ("open", |topic, _| Some(open(topic.open))),
    ("last hour", |topic, _| topic.last_hour.text()),
    ("oldest", |topic, now| {
        Some(rounded(now.since(time(topic.oldest)?)))
    }),
    ("removed in", removed_in),
];

fn completeness(stats: &DeadLetterStats) -> Completeness {
    stats.completeness.clone().unwrap_or_default()
}

/// What the services read, from Kafka.
async fn queues(config: &Config, timeout: Duration) -> Result<Vec<Queue>, CliError> {
    let kafka = kafka_of_command(config)?;
    let existing = topology::names(&kafka.client(), timeout).await?;
    let read = queues::queues(config, &kafka, &existing);
    let failed = |source| CliError::Kafka {
        brokers: config.kafka.brokers.clone(),
        source: Box::new(source),
    };
    let mut waiting = queues::waiting(&kafka, &read, timeout).map_err(failed)?;
    let members = members(&kafka, timeout).ok();
    let queues = read.into_iter().filter_map(|read| {
        Some(Queue {
            members: members
                .as_ref()
                .map(|members| members.get(&read.group).copied().unwrap_or(0)),
            waiting: waiting.remove(&read.topic)?,
            read,
        })
    });
    Ok(queues.collect())
}

async fn dead_letters(
    config: &Config,
    args: &StatusArgs,
) -> (Result<DeadLetterStats, CliError>, Vec<Obstacle>) {
    match args.services.inspector(config).await {
        Ok(connection) => {
            let client = DeadLetterClient::new(&connection);
            match client.stats("").await {
                Ok(stats) => (Ok(stats), of_inspector(&connection, "", "").await),
                Err(error) => (Err(error.into()), vec![not_asked("pipelines", "inspector")]),
            }
        }
        Err(error) => (Err(error), vec![not_asked("pipelines", "inspector")]),
    }
}

async fn jobs(config: &Config, args: &StatusArgs) -> (Option<Result<Stats, CliError>>, Vec<Obstacle>) {
    if !queues::needs_scheduler(config) {
        return (None, Vec::new());
    }
    match args.services.scheduler(config).await {
        Ok(connection) => {
            let client = JobClient::new(&connection);
            match client.stats(None, 1).await {
                Ok(stats) => (Some(Ok(stats)), of_scheduler(&connection, "").await),
                Err(error) => (Some(Err(error.into())), vec![not_asked("jobs", "scheduler")]),
            }
        }
        Err(error) => (Some(Err(error)), vec![not_asked("jobs", "scheduler")]),
    }
}

/// Why is said elsewhere.
fn not_asked(what: &str, service: &str) -> Obstacle {
    let why = format!("cannot ask the {service}");
    Obstacle::unknown(&format!("what holds up {what} is"), why)
}

#[cfg(test)]
mod tests {
    use redeliver_core::pipeline::TopicRole;
    use redeliver_kafka::backlog::Backlog;

    use super::*;

    fn queue(topic: &str, is_configured: bool, waiting: Waiting) -> Queue {
        Queue {
            read: queues::Queue {
                pipeline: Some("orders".into()),
                is_configured,
                topic: topic.into(),
                role: TopicRole::Source,
                group: "redeliver-orders".to_owned(),
            },
            members: Some(0),
            waiting,
        }
    }

    fn waiting(is_exact: bool, unreachable: Vec<i32>) -> Waiting {
        Waiting {
            backlog: Backlog {
                records: 54,
                is_exact,
            },
            unreachable,
            due: None,
        }
    }

    #[test]
    fn unconfigured_pipeline_is_marked() {
        let queue = |is_configured| queue("orders-retry-5s", is_configured, waiting(true, Vec::new()));
        let now = Timestamp::from_millis(0);
        let row = |is_configured| queue(is_configured).row(now);
        assert_eq!((&*row(true)[0], &*row(true)[2]), ("orders", "54"));
        assert_eq!(
            (&*row(false)[0], &*row(false)[2]),
            ("orders (not configured)", "≤ 54")
        );
        let json = queue(false).json(now);
        let (configured, exact) = (&json["configured"], &json["records_is_exact"]);
        assert_eq!((configured, exact), (&json!(false), &json!(false)));
    }

    #[test]
    fn unreachable_partitions_are_named() {
        let queue = queue("orders", true, waiting(false, vec![0, 3]));
        let status = Status {
            queues: Ok(vec![queue]),
            dead: Err(CliError::Failed(String::new())),
            jobs: None,
            obstacles: Vec::new(),
        };
        let now = Timestamp::from_millis(0);
        let text = status.text(now);
        for part in ["≈ 54", "orders: records may be missing", "do not answer: 0, 3"] {
            assert!(text.contains(part), "{text}");
        }
        assert_eq!(
            status.json(now)["queues"][0]["unreachable_partitions"],
            json!([0, 3])
        );
    }
}
