//! What is due in the next hour, and when it leaves.

mod forecast;

use askama::Template;
use askama::filters::Safe;
use axum::response::Response;
use futures::future::join_all;
use redeliver_client::Timestamp;
use redeliver_client::messages::{
    Control, GetWaitingStatsRequest, ListSchedulesRequest, Schedule, Stats, WaitingCounts, WaitingStats,
};
use serde::Deserialize;

use crate::backend::Backend;
use crate::html;
use crate::page::{Frame, Part, Problem, address, respond, segment, status};
use crate::parameters::Query;
use forecast::{End, Flow, Limit, Limits, add, retries};

const SECTION: &str = "/due";
const MINUTES: u32 = 60;
/// The most applications whose jobs are counted, each with a call.
const APPS: usize = 10;
/// The most rows of a table.
const ROWS: usize = 50;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Parameters {
    /// Set to read the retry topics, too.
    waiting: String,
}

#[derive(Template)]
#[template(path = "due.html")]
struct Page {
    frame: Frame,
    jobs: Part<(Stats, Hour)>,
    schedules: Part<Vec<Schedule>>,
    /// `None` before they were asked for.
    waits: Option<Part<(WaitingCounts, Hour)>>,
}

/// An hour, by minutes.
struct Hour {
    what: &'static str,
    /// What becomes due.
    due: Vec<u64>,
    /// What leaves, if anything has a rate or is paused.
    leaves: Option<Vec<u64>>,
    rows: Vec<Row>,
    more_rows: usize,
    /// What the forecast does not know.
    unknown: Vec<String>,
}

/// An application, a tier, or the workers of a pipeline.
struct Row {
    name: String,
    link: String,
    state: (&'static str, String),
    due: u64,
    total: u64,
    effect: Safe<String>,
}

impl Hour {
    fn new(
        what: &'static str,
        due: Vec<u64>,
        leaves: Vec<u64>,
        mut flows: Vec<Flow>,
        now: Timestamp,
    ) -> Self {
        let is_limited = flows.iter().any(|flow| flow.limit != Limit::None);
        // Those that are held up first; the others in their order.
        flows.sort_by_key(|flow| flow.limit == Limit::None);
        Self {
            what,
            due,
            leaves: is_limited.then_some(leaves),
            more_rows: flows.len().saturating_sub(ROWS),
            rows: flows.iter().take(ROWS).map(|flow| Row::of(flow, now)).collect(),
            unknown: Vec::new(),
        }
    }

    /// The highest bar of both charts.
    fn most(&self) -> u64 {
        self.due
            .iter()
            .chain(self.leaves.iter().flatten())
            .copied()
            .max()
            .unwrap_or(0)
    }

    fn chart_of_due(&self) -> Safe<String> {
        let label = format!("{} due in each of the next 60 minutes", self.what);
        html::bars_up_to(self.most(), &self.due, "hour", label)
    }

    fn chart_of_leaves(&self) -> Option<Safe<String>> {
        let label = format!("{} that leave in each of them, with rates and pauses", self.what);
        let leaves = self.leaves.as_ref()?;
        Some(html::bars_up_to(self.most(), leaves, "hour leaves", label))
    }

    /// The minutes in which something happens: the minute from now, what becomes due, and what leaves.
    fn minutes(&self) -> Vec<(usize, u64, Option<u64>)> {
        let leaves = |minute: usize| {
            self.leaves
                .as_ref()
                .and_then(|leaves| leaves.get(minute).copied())
        };
        let minutes = self.due.iter().enumerate();
        let minutes = minutes.map(|(minute, due)| (minute, *due, leaves(minute)));
        minutes
            .filter(|(_, due, leaves)| *due > 0 || leaves.unwrap_or(0) > 0)
            .collect()
    }
}

impl Row {
    fn of(flow: &Flow, now: Timestamp) -> Self {
        let (rate, state) = match flow.limit {
            Limit::None => (String::new(), ("running", "no rate".to_owned())),
            Limit::PerSecond(rate) => (format!("At {rate}/s"), ("running", format!("at most {rate}/s"))),
            Limit::Paused => (String::new(), ("paused", "paused".to_owned())),
        };
        let total = flow.total();
        let these = |count| format!("{rate}, these {} need until", html::number(count));
        let at = |wait| {
            let end = now.after(wait);
            format!("{} ({})", html::exact(end), html::time(end, now))
        };
        let effect = match flow.outflow().1 {
            _ if total == 0 => "Nothing is due.".to_owned(),
            End::OnTime if flow.limit == Limit::None => "Each leaves when it is due.".to_owned(),
            End::OnTime => "Each leaves within a minute of its due time.".to_owned(),
            End::After(count, wait) => format!("{} {}.", these(count), at(wait)),
            End::AtLeast(count, wait) => {
                format!(
                    "{} {}, or longer if more become due after this hour.",
                    these(count),
                    at(wait)
                )
            }
            End::Never => format!("{} wait until it is resumed.", html::number(total)),
        };
        Self {
            link: link(&flow.name),
            name: flow.name.clone(),
            state,
            due: flow.due,
            total,
            effect: Safe(effect),
        }
    }
}

/// Where the rate and the pause of a control are shown and changed.
fn link(control: &str) -> String {
    match control.split('/').collect::<Vec<_>>()[..] {
        ["app", app] => address("/jobs", &[("app", app)]),
        ["pipeline" | "tier", pipeline, ..] => segment("/pipelines", pipeline),
        _ => "/jobs".to_owned(),
    }
}

pub(crate) async fn page(backend: Backend, Query(parameters): Query<Parameters>) -> Response {
    let frame = Frame::new(SECTION, "Due").command("redeliver upcoming --for 1h");
    let schedules = backend.schedules();
    let request = ListSchedulesRequest {
        page_size: 20,
        ..ListSchedulesRequest::default()
    };
    let waits = async {
        if parameters.waiting.is_empty() {
            None
        } else {
            Some(waits(&backend, frame.now).await)
        }
    };
    let (jobs, schedules, waits) = tokio::join!(jobs(&backend, frame.now), schedules.list(request), waits);
    let page = Page {
        jobs,
        waits,
        schedules: schedules.map(|answer| answer.schedules).map_err(Problem::from),
        frame,
    };
    let status = status(&page.jobs);
    respond(&page, status)
}

/// What is paused and has a rate, and why that is unknown.
async fn limits(backend: &Backend, of: &str) -> (Limits, Option<String>) {
    let controls = backend.controls(of).list().await.map_err(Problem::from);
    let unknown = controls.as_ref().err().map(|problem| {
        let Problem { detail, advice, .. } = problem;
        format!("rates and pauses, so none is applied ({detail} {advice})")
    });
    let controls: Vec<Control> = controls.unwrap_or_default();
    (Limits::of(&controls), unknown)
}

/// Scheduled jobs, by application if that has a limit.
async fn jobs(backend: &Backend, now: Timestamp) -> Part<(Stats, Hour)> {
    let client = backend.jobs();
    let (stats, (limits, no_limits)) = tokio::join!(client.stats(None, MINUTES), limits(backend, "app/"));
    let stats = stats?;
    let mut unknown = Vec::from_iter(no_limits);
    let mut others = Flow::of_jobs("all others", Limit::None, &stats);
    let (mut flows, mut uncounted) = (Vec::new(), Vec::new());
    let mut apps: Vec<(&str, Limit)> = limits.apps().collect();
    // Those that are paused hold up most.
    apps.sort_by_key(|(_, limit)| *limit != Limit::Paused);
    let (counted, rest) = apps.split_at(APPS.min(apps.len()));
    let counts = counted.iter().map(|(app, _)| client.stats(Some(app), MINUTES));
    for ((app, limit), of_app) in counted.iter().zip(join_all(counts).await) {
        match of_app {
            Ok(of_app) => {
                let flow = Flow::of_jobs(&format!("app/{app}"), *limit, &of_app);
                others.remove(&flow);
                flows.push(flow);
            }
            Err(_) => uncounted.push(app),
        }
    }
    uncounted.extend(rest.iter().map(|(app, _)| app));
    if let Some(first) = uncounted.first() {
        unknown.push(format!(
            "how many jobs of {first} and other applications wait ({} in all): no limit is applied to them",
            uncounted.len()
        ));
    }
    // Without a limit, there is nothing to tell apart.
    if !flows.is_empty() {
        flows.push(others);
    }
    let mut leaves = vec![0; stats.per_minute.len()];
    for flow in &flows {
        add(&mut leaves, &flow.outflow().0);
    }
    let mut hour = Hour::new("Jobs", stats.per_minute.clone(), leaves, flows, now);
    hour.unknown = unknown;
    hour.unknown.extend([
        "jobs that schedules and callers create until then, and those that expire (expireAfter)".to_owned(),
        "long waits of a pipeline that has the name of an application, whose rate does not apply to them".to_owned(),
        "rates and pauses that you may not see, and how a rate is shared: a partition with more than its part takes longer".to_owned(),
    ]);
    Ok((stats, hour))
}

/// The records that wait in retry topics.
async fn waits(backend: &Backend, now: Timestamp) -> Part<(WaitingCounts, Hour)> {
    let request = GetWaitingStatsRequest {
        minutes: MINUTES,
        ..GetWaitingStatsRequest::default()
    };
    let client = backend.waiting();
    let (stats, (limits, no_limits)) = tokio::join!(client.stats(request, |_| {}), limits(backend, ""));
    let WaitingStats { total, places, .. } = stats?;
    let total = total.unwrap_or_default();
    let due = total.forecast.clone().unwrap_or_default().per_minute;
    let (flows, leaves) = retries(&places, &limits, due.len());
    let mut hour = Hour::new("Retries", due, leaves, flows, now);
    hour.unknown = Vec::from_iter(no_limits);
    hour.unknown.extend([
        "new failures, attempts that fail again, and records that reach max_age".to_owned(),
        "rates and pauses that you may not see, and how partitions share a rate".to_owned(),
        "new records, with which retries share the rate of a pipeline".to_owned(),
        "how long attempts take, circuit breakers, and rate_limit of a process".to_owned(),
    ]);
    Ok((total, hour))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn effects_say_until_when() {
        let flow = |limit, due| Flow {
            name: "app/sms".to_owned(),
            limit,
            due,
            per_minute: vec![0; 10],
        };
        let effect = |flow: &Flow| Row::of(flow, Timestamp::from_millis(0)).effect.0;
        let rate = Limit::PerSecond(5.0);
        for (flow, shown) in [
            (flow(rate, 0), "Nothing is due."),
            (
                flow(rate, 1_800),
                "At 5/s, these 1\u{202f}800 need until <time class=\"exact\" datetime=\"1970-01-01T00:06:00",
            ),
            (flow(rate, 6_000), "or longer"),
            (flow(Limit::Paused, 7), "7 wait until it is resumed."),
            (flow(Limit::None, 7), "Each leaves when it is due."),
        ] {
            assert!(
                effect(&flow).contains(shown),
                "{shown} is not in {}",
                effect(&flow)
            );
        }
    }

    #[test]
    fn controls_link_to_their_pages() {
        for (control, page) in [
            ("app/sms", "/jobs?app=sms"),
            ("pipeline/docs", "/pipelines/docs"),
            ("tier/docs/30s", "/pipelines/docs"),
            ("all others", "/jobs"),
        ] {
            assert_eq!(link(control), page);
        }
    }
}
