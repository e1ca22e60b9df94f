//! A schedule as text, as a row and as JSON.

use redeliver_client::convert::time;
use redeliver_client::messages::schedule_spec::Timing;
use redeliver_client::messages::{CronTiming, JobTemplate, Misfire, Schedule};
use redeliver_scheduler::api::ScheduleView;
use serde_json::json;

use crate::output::{Column, Json, Text as _, block, due, fields, header_lines};

/// Limit of the data in text output, in bytes.
const SHOWN: usize = 16 * 1024;

pub(super) const COLUMNS: [Column<Schedule>; 10] = [
    ("id", |schedule, _| schedule.id.text()),
    ("app", |schedule, _| job(schedule).app.text()),
    ("state", |schedule, _| schedule.state().name()),
    ("times", |schedule, _| times(schedule).0.text()),
    ("zone", |schedule, _| times(schedule).1.text()),
    ("next", |schedule, _| schedule.next_due_time.text()),
    ("in", |schedule, now| due(time(schedule.next_due_time), now)),
    ("dispatched", |schedule, _| schedule.dispatched.text()),
    ("skipped", |schedule, _| schedule.skipped.text()),
    ("problem", |schedule, _| schedule.problem.text()),
];

fn job(schedule: &Schedule) -> JobTemplate {
    let spec = schedule.spec.as_ref();
    spec.and_then(|spec| spec.job.clone()).unwrap_or_default()
}

/// The expression or the interval, and the zone.
fn times(schedule: &Schedule) -> (String, String) {
    match schedule.spec.as_ref().and_then(|spec| spec.timing.as_ref()) {
        Some(Timing::Cron(cron)) => (cron.expression.clone(), cron.zone.clone().unwrap_or_default()),
        Some(Timing::Every(every)) => {
            let interval = every.interval.text().unwrap_or_default();
            (format!("every {interval}"), String::new())
        }
        None => (String::new(), String::new()),
    }
}

pub(super) fn as_text(schedule: &Schedule) -> String {
    let spec = schedule.spec.clone().unwrap_or_default();
    let job = job(schedule);
    let (times, zone) = times(schedule);
    let cron = cron_of(schedule);
    let mut text = fields(&[
        ("id", &schedule.id),
        ("app", &format_args!("{}", job.app)),
        ("state", &schedule.state().name()),
        ("times", &format_args!("{times}")),
        ("zone", &zone),
        ("gap", &cron.and_then(|cron| cron.gap().name())),
        ("overlap", &cron.and_then(|cron| cron.overlap().name())),
        ("start", &spec.start),
        ("end", &spec.end),
        ("max count", &spec.max_count),
        ("jitter", &spec.jitter),
        ("misfire", &spec.misfire.as_ref().map(misfire_text)),
        ("next nominal time", &schedule.next_nominal_time),
        ("next due time", &schedule.next_due_time),
        ("problem", &schedule.problem),
        ("dispatched", &schedule.dispatched),
        ("skipped", &schedule.skipped),
        ("decided until", &schedule.decided_until),
        ("created at", &schedule.created_at),
        ("revision", &schedule.revision),
        ("priority", &job.priority().name()),
        ("expire after", &job.expire_after),
        ("key", &job.key),
    ]);
    if !job.headers.is_empty() {
        text += "\nheaders\n";
        text += &header_lines(&job.headers);
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

fn misfire_text(misfire: &Misfire) -> String {
    let limit = misfire.limit.map(|limit| format!(" up to {limit}"));
    let limit = limit.unwrap_or_default();
    let policy = misfire.policy().name().unwrap_or_default();
    let grace = misfire.grace.text().unwrap_or_default();
    format!("{policy}{limit}, after {grace}")
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
    use redeliver_client::convert::to_timestamp;
    use redeliver_client::messages::{GapPolicy, MisfirePolicy, OverlapPolicy, ScheduleSpec, ScheduleState};
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
    fn a_row_shows_the_next_occurrence() {
        let row_at = |now: &str| {
            let now = now.parse().unwrap();
            let cells = COLUMNS
                .iter()
                .map(|(_, cell)| cell(&schedule(), now).unwrap_or_default());
            cells.collect::<Vec<_>>()
        };
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
    fn a_schedule_shows_policies_and_job() {
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
