//! What holds up records of pipelines and jobs of applications: pauses, limits, open circuit breakers, and topics that cannot be written.

use std::fmt;

use redeliver_client::messages::{
    Application, BreakerState, Control, Overview, OverviewPart, OverviewSelection, PipelineOverview, Problem,
    ProblemKind, RecordCount, RunOverview,
};
use redeliver_client::{ClientError, Code, Connection, ControlClient, JobClient, OverviewClient};
use redeliver_core::error_chain::error_chain;
use serde_json::json;
use tokio::time::timeout;

use crate::controls::is_paused;
use crate::output::{Column, Json, Text as _};

/// The limits of the inspector.
const MAX_PIPELINES: u32 = 1_000;
const MAX_PROBLEMS: u32 = 500;

/// Something that holds up records or jobs.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Obstacle {
    /// What it holds up, by the name of its control, such as `tier/docs/30s`. Empty: unknown.
    name: String,
    cause: Cause,
    /// Since when, as far as it is known.
    since: Option<String>,
    what: String,
    /// By whom, or after what: continues the sentence.
    why: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cause {
    Paused,
    Limited,
    Breaker,
    Topic,
    /// It is unknown whether there is one.
    Unknown,
}

impl Cause {
    fn name(self) -> &'static str {
        match self {
            Self::Paused => "paused",
            Self::Limited => "limited",
            Self::Breaker => "breaker",
            Self::Topic => "topic",
            Self::Unknown => "unknown",
        }
    }
}

pub(crate) const COLUMNS: [Column<Obstacle>; 2] = [
    ("held up", |obstacle, _| obstacle.name.text()),
    ("by", |obstacle, _| obstacle.sentence().text()),
];

impl Obstacle {
    fn new(name: &str, cause: Cause, what: impl fmt::Display) -> Self {
        Self {
            name: name.to_owned(),
            cause,
            since: None,
            what: what.to_string(),
            why: String::new(),
        }
    }

    pub(crate) fn unknown(what: &str, why: impl fmt::Display) -> Self {
        Self::new("", Cause::Unknown, format_args!("{what} unknown: {why}"))
    }

    fn sentence(&self) -> String {
        let since = self.since.as_ref().map(|since| format!(" since {since}"));
        format!("{}{}{}", self.what, since.unwrap_or_default(), self.why)
    }

    /// Whether it holds up only what is due.
    pub(crate) fn is_limit(&self) -> bool {
        self.cause == Cause::Limited
    }

    pub(crate) fn json(&self) -> Json {
        json!({
            "name": self.name.text(),
            "cause": self.cause.name(),
            "since": self.since,
            "detail": self.sentence(),
        })
    }
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &*self.name {
            "" => f.write_str(&self.sentence()),
            name => write!(f, "{name}: {}", self.sentence()),
        }
    }
}

/// What holds up records of these pipelines. `place`: only in this tier, besides what holds up their workers; empty: in all.
fn of_pipelines(overview: &Overview, place: &str) -> Vec<Obstacle> {
    let mut found = Vec::new();
    for part in &overview.incomplete {
        let what = match part.part() {
            OverviewPart::Topics => "missing topics are",
            OverviewPart::Controls => "what is paused or limited is",
            // An installation may do without them: then there is no time.
            OverviewPart::Breakers if part.since.is_some() => "circuit breakers are",
            _ => continue,
        };
        found.push(Obstacle::unknown(what, &part.problem));
    }
    let shown = overview.pipelines.len();
    if (shown as u64) < u64::from(overview.pipeline_count) {
        let why = format!("the first {shown} of {} are shown", overview.pipeline_count);
        found.push(Obstacle::unknown("other pipelines are", why));
    }
    for pipeline in &overview.pipelines {
        for obstacle in of_pipeline(pipeline, &overview.problems, place) {
            // That of a tier of all pipelines is said once.
            if !found.contains(&obstacle) {
                found.push(obstacle);
            }
        }
    }
    found
}

fn of_pipeline(pipeline: &PipelineOverview, problems: &[Problem], place: &str) -> Vec<Obstacle> {
    let name = format!("pipeline/{}", pipeline.pipeline);
    let problem = |kind: ProblemKind, topic: &str| {
        let is_it = |problem: &&Problem| {
            problem.kind() == kind && problem.pipeline == pipeline.pipeline && problem.topic == topic
        };
        problems.iter().find(is_it)
    };
    let waits = |count: &RecordCount| count.records != Some(0);
    let due = pipeline.waiting.iter().filter(|waiting| waiting.place == "due");
    let mut queued = due.filter_map(|due| due.waiting.as_ref()).chain(&pipeline.lag);
    let mut found = Vec::from_iter(of_run(&name, pipeline.run.as_ref(), queued.any(waits)));
    let breaker = match pipeline.breaker() {
        BreakerState::Open => Some("circuit breaker open"),
        BreakerState::HalfOpen => Some("circuit breaker half open"),
        BreakerState::Closed | BreakerState::Unspecified => None,
    };
    found.extend(breaker.map(|what| {
        let problem = problem(ProblemKind::BreakerOpen, "");
        let code = problem.and_then(|problem| problem.error_code.text());
        Obstacle {
            since: problem.and_then(|problem| problem.since.text()),
            why: code.map(|code| format!(" after {code}")).unwrap_or_default(),
            ..Obstacle::new(&name, Cause::Breaker, what)
        }
    }));
    found.extend(pipeline.missing_topics.iter().map(|topic| Obstacle {
        since: problem(ProblemKind::TopicMissing, topic).and_then(|problem| problem.since.text()),
        ..Obstacle::new(&name, Cause::Topic, format_args!("topic {topic} does not exist"))
    }));
    let places = pipeline.waiting.iter();
    let places = places.filter(|waiting| place.is_empty() || waiting.place == place);
    found.extend(places.filter_map(|waiting| {
        let name = format!("tier/{}/{}", pipeline.pipeline, waiting.place);
        of_run(&name, waiting.run.as_ref(), waiting.overdue != Some(0))
    }));
    found
}

/// A pause, or a limit if something may wait for it.
fn of_run(name: &str, run: Option<&RunOverview>, waits: bool) -> Option<Obstacle> {
    let run = run?;
    if run.paused != Some(true) {
        let limit = run.per_second.filter(|_| waits)?;
        return Some(Obstacle::new(
            name,
            Cause::Limited,
            format_args!("limited to {limit}/s"),
        ));
    }
    let with = |word: &str, text: &str| {
        text.text()
            .map(|text| format!("{word}{text}"))
            .unwrap_or_default()
    };
    // It may be the tier of all pipelines.
    let name = if run.control.is_empty() {
        name
    } else {
        &run.control
    };
    Some(Obstacle {
        since: run.since.text(),
        why: with(" by ", &run.by) + &with(": ", &run.reason),
        ..Obstacle::new(name, Cause::Paused, "paused")
    })
}

/// What holds up jobs of these applications. The controls tell who has paused them.
fn of_apps(apps: &[Application], controls: &[Control]) -> Vec<Obstacle> {
    let of_app = |app: &Application| {
        let name = format!("app/{}", app.name);
        let control = controls
            .iter()
            .find(|control| control.name == name && is_paused(control));
        let control = control.cloned().unwrap_or_default();
        let run = RunOverview {
            paused: app.paused,
            per_second: app.rate_per_second,
            control: control.name,
            since: control.changed_at,
            by: control.changed_by,
            reason: control.reason,
        };
        let hidden = app.paused.is_none() && app.due > 0;
        let hidden = hidden.then(|| {
            let what = format!("whether {name} is paused is");
            Obstacle::unknown(&what, "this needs the scope control:read")
        });
        let topic = app.topic_problem.text().map(|problem| {
            let what = format!("topic {} {problem}", app.topic);
            Obstacle::new(&name, Cause::Topic, what)
        });
        [of_run(&name, Some(&run), app.due > 0), hidden, topic]
    };
    apps.iter().flat_map(of_app).flatten().collect()
}

/// What holds up records of a pipeline, or of all, as the inspector knows. `place`: see [`of_pipelines`].
pub(crate) async fn of_inspector(connection: &Connection, pipeline: &str, place: &str) -> Vec<Obstacle> {
    let unknown = |why: String| vec![Obstacle::unknown("what holds up pipelines is", why)];
    let limit = connection.timeout();
    match timeout(limit, overview(connection, pipeline)).await {
        Ok(Ok(overview)) => of_pipelines(&overview, place),
        Ok(Err(error)) => unknown(error_chain(&error)),
        Err(_) => unknown(format!("no answer within {limit:?}")),
    }
}

/// An overview that knows which topics are missing, which takes two surveys.
async fn overview(connection: &Connection, pipeline: &str) -> Result<Overview, ClientError> {
    let selection = OverviewSelection {
        pipeline: pipeline.to_owned(),
        limit: MAX_PIPELINES,
        problem_limit: MAX_PROBLEMS,
        ..OverviewSelection::default()
    };
    let mut watch = OverviewClient::new(connection).watch_overview(selection).await?;
    let overview = watch.next().await?;
    let mut incomplete = overview.incomplete.iter();
    let is_first = overview.pipelines.iter().any(|pipeline| pipeline.rates.is_none());
    // The rates come with the second one, unless the topics are unknown.
    match is_first && incomplete.all(|part| part.part() != OverviewPart::Topics) {
        true => watch.next().await,
        false => Ok(overview),
    }
}

/// What holds up jobs of an application, or of all, as the scheduler knows.
pub(crate) async fn of_scheduler(connection: &Connection, app: &str) -> Vec<Obstacle> {
    match applications(connection).await {
        Ok((mut apps, controls)) => {
            apps.retain(|known| app.is_empty() || known.name == app);
            of_apps(&apps, &controls)
        }
        Err(error) => vec![Obstacle::unknown("what holds up jobs is", error_chain(&error))],
    }
}

async fn applications(connection: &Connection) -> Result<(Vec<Application>, Vec<Control>), ClientError> {
    let (jobs, controls) = (JobClient::new(connection), ControlClient::new(connection));
    let (apps, controls) = tokio::join!(jobs.applications(), controls.list());
    let controls = match controls {
        // Then the applications do not tell what is paused, either.
        Err(error) if error.code() == Some(Code::PermissionDenied) => Vec::new(),
        controls => controls?,
    };
    Ok((apps?, controls))
}

#[cfg(test)]
mod tests {
    use redeliver_client::messages::control::Effective;
    use redeliver_client::messages::{ApplicationControl, IncompletePart, RunState, WaitingOverview};

    use super::*;

    const SINCE: Option<prost_types::Timestamp> = Some(prost_types::Timestamp { seconds: 0, nanos: 0 });

    fn pipeline(name: &str) -> PipelineOverview {
        PipelineOverview {
            pipeline: name.to_owned(),
            lag: Some(records(0)),
            run: Some(run()),
            breaker: BreakerState::Closed.into(),
            ..PipelineOverview::default()
        }
    }

    fn records(count: u64) -> RecordCount {
        RecordCount {
            records: Some(count),
            ..RecordCount::default()
        }
    }

    fn run() -> RunOverview {
        RunOverview {
            paused: Some(false),
            ..RunOverview::default()
        }
    }

    fn paused(control: &str) -> RunOverview {
        RunOverview {
            paused: Some(true),
            // Has no effect meanwhile.
            per_second: Some(5.0),
            control: control.to_owned(),
            since: SINCE,
            by: "token:ann".to_owned(),
            reason: "INC-17".to_owned(),
        }
    }

    fn limited() -> RunOverview {
        RunOverview {
            per_second: Some(0.5),
            ..run()
        }
    }

    fn tier(run: RunOverview, overdue: Option<u64>) -> WaitingOverview {
        WaitingOverview {
            place: "30s".to_owned(),
            overdue,
            run: Some(run),
            ..WaitingOverview::default()
        }
    }

    fn overview(pipelines: Vec<PipelineOverview>) -> Overview {
        Overview {
            pipeline_count: u32::try_from(pipelines.len()).unwrap(),
            pipelines,
            ..Overview::default()
        }
    }

    fn texts(obstacles: &[Obstacle]) -> Vec<String> {
        obstacles.iter().map(Obstacle::to_string).collect()
    }

    #[test]
    fn each_obstacle_has_its_sentence() {
        const BY: &str = "since 1970-01-01T00:00:00.000Z by token:ann: INC-17";
        let of = |overview: &Overview| texts(&of_pipelines(overview, ""));
        let held = |change: fn(&mut PipelineOverview)| {
            let mut held = pipeline("docs");
            change(&mut held);
            of(&overview(vec![held]))
        };
        assert!(held(|_| ()).is_empty());
        // Without its control: the caller may not see it.
        let hidden = held(|docs| {
            docs.run = Some(RunOverview {
                paused: Some(true),
                ..run()
            });
        });
        assert_eq!(hidden, ["pipeline/docs: paused"]);
        let all = held(|docs| {
            docs.run = Some(paused("pipeline/docs"));
            docs.set_breaker(BreakerState::HalfOpen);
            docs.missing_topics = vec!["docs-out".to_owned()];
            docs.waiting = vec![tier(paused("tier/docs/30s"), Some(0))];
        });
        let expected = [
            format!("pipeline/docs: paused {BY}"),
            "pipeline/docs: circuit breaker half open".to_owned(),
            "pipeline/docs: topic docs-out does not exist".to_owned(),
            format!("tier/docs/30s: paused {BY}"),
        ];
        assert_eq!(all, expected);

        let mut broken = overview(vec![pipeline("docs"), pipeline("other")]);
        broken.pipelines[0].set_breaker(BreakerState::Open);
        broken.pipelines[0].missing_topics = vec!["docs-out".to_owned()];
        let problem = |pipeline: &str, kind: ProblemKind, topic: &str, code: &str| Problem {
            kind: kind.into(),
            pipeline: pipeline.to_owned(),
            since: SINCE,
            topic: topic.to_owned(),
            error_code: code.to_owned(),
            ..Problem::default()
        };
        broken.problems = vec![
            problem("other", ProblemKind::BreakerOpen, "", "io.connect"),
            problem("docs", ProblemKind::BreakerOpen, "", "http.503"),
            problem("docs", ProblemKind::TopicMissing, "docs-out", ""),
        ];
        let expected = [
            "pipeline/docs: circuit breaker open since 1970-01-01T00:00:00.000Z after http.503",
            "pipeline/docs: topic docs-out does not exist since 1970-01-01T00:00:00.000Z",
        ];
        assert_eq!(of(&broken), expected);
    }

    #[test]
    fn limits_hold_up_what_is_there() {
        let limited_to = |lag: RecordCount, overdue: Option<u64>| {
            let mut held = pipeline("docs");
            held.run = Some(limited());
            held.lag = Some(lag);
            held.waiting = vec![tier(limited(), overdue)];
            texts(&of_pipelines(&overview(vec![held]), ""))
        };
        let (workers, tier) = (
            "pipeline/docs: limited to 0.5/s",
            "tier/docs/30s: limited to 0.5/s",
        );
        assert_eq!(limited_to(records(0), Some(0)), [] as [&str; 0]);
        assert_eq!(limited_to(records(1), Some(0)), [workers]);
        assert_eq!(limited_to(records(0), Some(1)), [tier]);
        // Unknown.
        assert_eq!(limited_to(RecordCount::default(), None), [workers, tier]);

        let mut due = pipeline("docs");
        due.run = Some(limited());
        due.waiting = vec![WaitingOverview {
            place: "due".to_owned(),
            waiting: Some(records(1)),
            ..WaitingOverview::default()
        }];
        assert_eq!(texts(&of_pipelines(&overview(vec![due]), "")), [workers]);
    }

    #[test]
    fn whole_tier_is_named_once() {
        let of = |name: &str| PipelineOverview {
            waiting: vec![tier(paused("tier/30s"), None)],
            ..pipeline(name)
        };
        let both = overview(vec![of("docs"), of("other")]);
        let names = |place: &str| {
            let found = of_pipelines(&both, place).into_iter();
            found.map(|obstacle| obstacle.name).collect::<Vec<_>>()
        };
        assert_eq!(names(""), ["tier/30s"]);
        assert_eq!(names("30s"), ["tier/30s"]);
        assert_eq!(names("due"), [""; 0]);
    }

    #[test]
    fn unknown_parts_are_said() {
        let part = |part: OverviewPart, since| IncompletePart {
            part: part.into(),
            since,
            problem: "its topic cannot be read".to_owned(),
        };
        let mut partial = overview(vec![pipeline("docs")]);
        partial.pipeline_count = 2;
        partial.incomplete = vec![
            part(OverviewPart::Controls, SINCE),
            // This installation does without.
            part(OverviewPart::Breakers, None),
            part(OverviewPart::DeadLetters, SINCE),
        ];
        let found = of_pipelines(&partial, "");
        let expected = [
            "what is paused or limited is unknown: its topic cannot be read",
            "other pipelines are unknown: the first 1 of 2 are shown",
        ];
        assert_eq!(texts(&found), expected);
        let json = found[0].json();
        assert_eq!((&json["name"], &json["cause"]), (&Json::Null, &json!("unknown")));
    }

    #[test]
    fn controls_tell_who_paused_an_application() {
        let app = |name: &str, paused, due, problem: &str| Application {
            name: name.to_owned(),
            topic: format!("{name}-jobs"),
            paused,
            rate_per_second: paused.map(|_| 2.5),
            due,
            topic_problem: problem.to_owned(),
            ..Application::default()
        };
        let control = |name: &str, state: RunState| Control {
            name: name.to_owned(),
            changed_at: SINCE,
            changed_by: "token:ann".to_owned(),
            reason: "INC-17".to_owned(),
            effective: Some(Effective::EffectiveApplication(ApplicationControl {
                state: state.into(),
                ..ApplicationControl::default()
            })),
            ..Control::default()
        };
        let controls = [
            control("app/sms", RunState::Paused),
            control("app/mail", RunState::Running),
        ];
        let apps = [
            app("sms", Some(true), 0, ""),
            app("mail", Some(true), 0, ""),
            app("idle", Some(false), 0, ""),
            app("late", Some(false), 1, ""),
            app("gone", Some(false), 0, "does not exist"),
            app("hidden", None, 1, ""),
        ];
        let found = of_apps(&apps, &controls);
        let expected = [
            "app/sms: paused since 1970-01-01T00:00:00.000Z by token:ann: INC-17",
            // By the configuration.
            "app/mail: paused",
            "app/late: limited to 2.5/s",
            "app/gone: topic gone-jobs does not exist",
            "whether app/hidden is paused is unknown: this needs the scope control:read",
        ];
        assert_eq!(texts(&found), expected);
        let paused = json!({
            "name": "app/sms",
            "cause": "paused",
            "since": "1970-01-01T00:00:00.000Z",
            "detail": "paused since 1970-01-01T00:00:00.000Z by token:ann: INC-17",
        });
        assert_eq!(found[0].json(), paused);
    }
}
