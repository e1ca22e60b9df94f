//! A schedule as text, as a row and as JSON.

use redeliver_client::Timestamp;
use redeliver_client::messages::schedule_spec::Timing;
use redeliver_client::messages::{
    CronTiming, GapPolicy, IntervalTiming, JobTemplate, Misfire, MisfirePolicy, OverlapPolicy, Schedule,
    ScheduleState,
};
use redeliver_proto::convert::{from_duration, from_headers, from_priority, from_timestamp};
use serde_json::{Map, Value, json};

use crate::dlq::rounded;
use crate::output::{block, fields, header_lines, headers_json, insert_bytes, line};

/// Limit of the data in text output, in bytes.
const SHOWN: usize = 16 * 1024;

pub(super) const COLUMNS: [&str; 10] = [
    "id",
    "app",
    "state",
    "times",
    "zone",
    "next",
    "in",
    "dispatched",
    "skipped",
    "problem",
];

fn time(time: Option<&prost_types::Timestamp>) -> Option<Timestamp> {
    from_timestamp(time?)
}

fn shown(time_of: Option<&prost_types::Timestamp>) -> Option<String> {
    time(time_of).map(|time| time.to_string())
}

fn duration(duration: Option<&prost_types::Duration>) -> Option<String> {
    Some(from_duration(duration?)?.to_string())
}

fn state(schedule: &Schedule) -> &'static str {
    match schedule.state() {
        ScheduleState::Unspecified => "unknown",
        ScheduleState::Active => "active",
        ScheduleState::Paused => "paused",
        ScheduleState::Finished => "finished",
    }
}

fn job(schedule: &Schedule) -> JobTemplate {
    let spec = schedule.spec.as_ref();
    spec.and_then(|spec| spec.job.clone()).unwrap_or_default()
}

/// The expression or the interval, and the zone.
fn times(schedule: &Schedule) -> (String, String) {
    match schedule.spec.as_ref().and_then(|spec| spec.timing.as_ref()) {
        Some(Timing::Cron(cron)) => (cron.expression.clone(), cron.zone.clone()),
        Some(Timing::Every(every)) => {
            let interval = duration(every.interval.as_ref()).unwrap_or_default();
            (format!("every {interval}"), String::new())
        }
        None => (String::new(), String::new()),
    }
}

/// How long it takes until the next occurrence is due.
fn until_next(schedule: &Schedule, now: Timestamp) -> String {
    match time(schedule.next_due_time.as_ref()) {
        None => String::new(),
        Some(next) if next > now => format!("in {}", rounded(next.since(now))),
        Some(next) => format!("{} late", rounded(now.since(next))),
    }
}

pub(super) fn row(schedule: &Schedule, now: Timestamp) -> Vec<String> {
    let (times, zone) = times(schedule);
    vec![
        schedule.id.clone(),
        job(schedule).app,
        state(schedule).to_owned(),
        times,
        zone,
        shown(schedule.next_due_time.as_ref()).unwrap_or_default(),
        until_next(schedule, now),
        schedule.dispatched.to_string(),
        schedule.skipped.to_string(),
        schedule.problem.clone(),
    ]
}

pub(super) fn as_text(schedule: &Schedule) -> String {
    let spec = schedule.spec.clone().unwrap_or_default();
    let job = job(schedule);
    let (times, zone) = times(schedule);
    let some = |text: String| (!text.is_empty()).then_some(text);
    let mut text = fields(&[
        ("id", Some(schedule.id.clone())),
        ("app", Some(job.app.clone())),
        ("state", Some(state(schedule).to_owned())),
        ("times", Some(times)),
        ("zone", some(zone)),
        ("gap", cron_of(schedule).and_then(gap).map(str::to_owned)),
        ("overlap", cron_of(schedule).and_then(overlap).map(str::to_owned)),
        ("start", shown(spec.start.as_ref())),
        ("end", shown(spec.end.as_ref())),
        (
            "max count",
            (spec.max_count != 0).then(|| spec.max_count.to_string()),
        ),
        ("jitter", duration(spec.jitter.as_ref())),
        ("misfire", spec.misfire.as_ref().map(misfire_text)),
        ("next nominal time", shown(schedule.next_nominal_time.as_ref())),
        ("next due time", shown(schedule.next_due_time.as_ref())),
        ("problem", some(schedule.problem.clone())),
        ("dispatched", Some(schedule.dispatched.to_string())),
        ("skipped", Some(schedule.skipped.to_string())),
        ("decided until", shown(schedule.decided_until.as_ref())),
        ("created at", shown(schedule.created_at.as_ref())),
        ("revision", Some(schedule.revision.to_string())),
        ("priority", Some(from_priority(job.priority()).to_string())),
        ("expire after", duration(job.expire_after.as_ref())),
        ("key", job.key.as_ref().map(|key| line(key, 1024))),
    ]);
    if !job.headers.is_empty() {
        text += "\nheaders\n";
        text += &header_lines(&from_headers(&job.headers));
    }
    if !job.data.is_empty() {
        text += &format!("\ndata, {} bytes\n", job.data.len());
        text += &block(&job.data, SHOWN);
    }
    text
}

fn cron_of(schedule: &Schedule) -> Option<&CronTiming> {
    match schedule.spec.as_ref()?.timing.as_ref()? {
        Timing::Cron(cron) => Some(cron),
        Timing::Every(_) => None,
    }
}

fn gap(cron: &CronTiming) -> Option<&'static str> {
    match cron.gap() {
        GapPolicy::Unspecified => None,
        GapPolicy::Shift => Some("shift"),
        GapPolicy::Skip => Some("skip"),
    }
}

fn overlap(cron: &CronTiming) -> Option<&'static str> {
    match cron.overlap() {
        OverlapPolicy::Unspecified => None,
        OverlapPolicy::First => Some("first"),
        OverlapPolicy::Both => Some("both"),
    }
}

fn policy(misfire: &Misfire) -> &'static str {
    match misfire.policy() {
        MisfirePolicy::Skip => "skip",
        MisfirePolicy::Unspecified | MisfirePolicy::Once => "once",
        MisfirePolicy::All => "all",
    }
}

fn misfire_text(misfire: &Misfire) -> String {
    let limit = match misfire.limit {
        0 => String::new(),
        limit => format!(" up to {limit}"),
    };
    let grace = duration(misfire.grace.as_ref()).unwrap_or_default();
    format!("{}{limit}, after {grace}", policy(misfire))
}

fn cron_json(cron: &CronTiming) -> Value {
    json!({
        "expression": cron.expression,
        "zone": cron.zone,
        "gap": gap(cron),
        "overlap": overlap(cron),
    })
}

fn every_json(every: &IntervalTiming) -> Value {
    json!({
        "interval": duration(every.interval.as_ref()),
        "anchor": shown(every.anchor.as_ref()),
    })
}

pub(super) fn as_json(schedule: &Schedule) -> Value {
    let spec = schedule.spec.clone().unwrap_or_default();
    let job = job(schedule);
    let (cron, every) = match &spec.timing {
        Some(Timing::Cron(cron)) => (Some(cron_json(cron)), None),
        Some(Timing::Every(every)) => (None, Some(every_json(every))),
        None => (None, None),
    };
    let misfire = spec.misfire.as_ref().map(|misfire| {
        json!({
            "policy": policy(misfire),
            "limit": (misfire.limit != 0).then_some(misfire.limit),
            "grace": duration(misfire.grace.as_ref()),
        })
    });
    let problem = &schedule.problem;
    let mut object = Map::new();
    let mut put = |name: &str, value: Value| object.insert(name.to_owned(), value);
    put("id", json!(schedule.id));
    put("app", json!(job.app));
    put("state", json!(state(schedule)));
    put("cron", json!(cron));
    put("every", json!(every));
    put("start", json!(shown(spec.start.as_ref())));
    put("end", json!(shown(spec.end.as_ref())));
    put(
        "max_count",
        json!((spec.max_count != 0).then_some(spec.max_count)),
    );
    put("jitter", json!(duration(spec.jitter.as_ref())));
    put("misfire", json!(misfire));
    put(
        "next_nominal_time",
        json!(shown(schedule.next_nominal_time.as_ref())),
    );
    put("next_due_time", json!(shown(schedule.next_due_time.as_ref())));
    put("problem", json!((!problem.is_empty()).then_some(problem)));
    put("dispatched", json!(schedule.dispatched));
    put("skipped", json!(schedule.skipped));
    put("decided_until", json!(shown(schedule.decided_until.as_ref())));
    put("created_at", json!(shown(schedule.created_at.as_ref())));
    put("revision", json!(schedule.revision));
    put("priority", json!(from_priority(job.priority()).as_str()));
    put("expire_after", json!(duration(job.expire_after.as_ref())));
    // Answers to changes and lists do not contain them.
    if !job.data.is_empty() || job.key.is_some() || !job.headers.is_empty() {
        insert_bytes(&mut object, "key", job.key.as_deref());
        insert_bytes(&mut object, "data", Some(&job.data));
        object.insert("headers".to_owned(), headers_json(&from_headers(&job.headers)));
    }
    Value::Object(object)
}

#[cfg(test)]
mod tests {
    use redeliver_client::messages::{ScheduleSpec, ScheduleState};
    use redeliver_proto::convert::to_timestamp;

    use super::*;

    fn schedule() -> Schedule {
        let next = Some(to_timestamp("2026-11-25T01:30:00Z".parse().unwrap()));
        Schedule {
            id: "nightly".to_owned(),
            spec: Some(ScheduleSpec {
                timing: Some(Timing::Cron(CronTiming {
                    expression: "30 2 * * *".to_owned(),
                    zone: "Europe/Berlin".to_owned(),
                    gap: GapPolicy::Shift.into(),
                    overlap: OverlapPolicy::First.into(),
                })),
                misfire: Some(Misfire {
                    policy: MisfirePolicy::All.into(),
                    limit: 5,
                    grace: Some(prost_types::Duration {
                        seconds: 60,
                        nanos: 0,
                    }),
                }),
                job: Some(JobTemplate {
                    app: "sms".to_owned(),
                    data: bytes::Bytes::from_static(b"{}"),
                    ..JobTemplate::default()
                }),
                ..ScheduleSpec::default()
            }),
            state: ScheduleState::Active.into(),
            revision: 2,
            dispatched: 7,
            next_nominal_time: next,
            next_due_time: next,
            ..Schedule::default()
        }
    }

    #[test]
    fn a_row_says_when_the_next_occurrence_is_due() {
        let row_at = |now: &str| row(&schedule(), now.parse().unwrap());
        assert_eq!(
            row_at("2026-11-24T22:20:00Z"),
            [
                "nightly",
                "sms",
                "active",
                "30 2 * * *",
                "Europe/Berlin",
                "2026-11-25T01:30:00.000Z",
                "in 3h",
                "7",
                "0",
                ""
            ]
        );
        assert_eq!(row_at("2026-11-25T01:31:30Z")[6], "90s late");
    }

    #[test]
    fn a_schedule_is_shown_with_its_policies_and_its_job() {
        let expected = "\
id                 nightly
app                sms
state              active
times              30 2 * * *
zone               Europe/Berlin
gap                shift
overlap            first
misfire            all up to 5, after 1m
next nominal time  2026-11-25T01:30:00.000Z
next due time      2026-11-25T01:30:00.000Z
dispatched         7
skipped            0
revision           2
priority           normal

data, 2 bytes
{}";
        assert_eq!(as_text(&schedule()), expected);
        let value = as_json(&schedule());
        assert_eq!(
            (&value["cron"]["zone"], &value["misfire"]["limit"], &value["data"]),
            (&json!("Europe/Berlin"), &json!(5), &json!("{}"))
        );
        assert_eq!((&value["every"], &value["problem"]), (&Value::Null, &Value::Null));
    }
}
