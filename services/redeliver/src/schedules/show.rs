//! A schedule as text, as a row and as JSON.

use redeliver_client::Timestamp;
use redeliver_client::messages::schedule_spec::Timing;
use redeliver_client::messages::{
    CronTiming, GapPolicy, JobTemplate, Misfire, MisfirePolicy, OverlapPolicy, Schedule, ScheduleState,
};
use redeliver_proto::convert::{from_duration, from_headers, from_priority, from_timestamp};
use redeliver_scheduler::api::ScheduleView;
use serde_json::json;

use crate::dlq::rounded;
use crate::output::{Json, block, fields, header_lines, line};

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
        Some(Timing::Cron(cron)) => (cron.expression.clone(), cron.zone.clone().unwrap_or_default()),
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
        ("max count", spec.max_count.map(|count| count.to_string())),
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
    let limit = misfire.limit.map(|limit| format!(" up to {limit}"));
    let limit = limit.unwrap_or_default();
    let grace = duration(misfire.grace.as_ref()).unwrap_or_default();
    format!("{}{limit}, after {grace}", policy(misfire))
}

/// A schedule as REST shows it in answers to changes and in lists: without data, key and headers.
pub(super) fn as_json(schedule: &Schedule) -> Json {
    json!(ScheduleView::from(schedule.clone()))
}

/// A schedule as REST shows it, so that it can be sent back. Its data is, byte for byte, what it was.
pub(super) fn definition_json(schedule: &Schedule) -> String {
    serde_json::to_string(&ScheduleView::whole(schedule.clone())).expect("the names of all fields are text")
}

#[cfg(test)]
mod tests {
    use redeliver_client::messages::{ScheduleSpec, ScheduleState};
    use redeliver_proto::convert::to_timestamp;
    use redeliver_scheduler::request::read_schedule_json;

    use super::*;

    fn schedule() -> Schedule {
        let next = Some(to_timestamp("2026-11-25T01:30:00Z".parse().unwrap()));
        Schedule {
            id: "nightly".to_owned(),
            spec: Some(ScheduleSpec {
                timing: Some(Timing::Cron(CronTiming {
                    expression: "30 2 * * *".to_owned(),
                    zone: Some("Europe/Berlin".to_owned()),
                    gap: GapPolicy::Shift.into(),
                    overlap: OverlapPolicy::First.into(),
                })),
                misfire: Some(Misfire {
                    policy: MisfirePolicy::All.into(),
                    limit: Some(5),
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
    fn row_shows_next_occurrence() {
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
    fn shown_json_can_be_read() {
        let mut shown = schedule();
        let job = shown.spec.as_mut().unwrap().job.as_mut().unwrap();
        job.data = bytes::Bytes::from_static(b"{ \"n\": 1.50 }");
        let job = job.clone();
        let text = definition_json(&shown);
        let read = read_schedule_json(&text.into(), &jiff::tz::TimeZone::UTC).unwrap();
        assert_eq!(read.id.as_deref(), Some("nightly"));
        assert_eq!(read.spec.job.unwrap().data, job.data);
    }
}
