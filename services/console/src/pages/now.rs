//! What is wrong now, the most urgent first, and where.

use askama::Template;
use axum::extract::State;
use axum::response::Response;
use redeliver_client::convert::{from_duration, time};
use redeliver_client::messages::{
    Control, Group, GroupState, ListGroupsRequest, ListRedrivesRequest, Removal,
    RunState, TopicStats, control,
};

use super::{groups, redrives};
use crate::backend::Backend;
use crate::html;
use crate::page::{Frame, Part, Problem, address, gaps, respond};

/// The most groups and redrives that the page looks at.
const MOST: i32 = 20;
/// Letters that expire earlier than this are a problem.
const EXPIRES_SOON: u64 = 24 * 3_600;

#[derive(Template)]
#[template(path = "now.html")]
struct Page {
    frame: Frame,
    concerns: Vec<Concern>,
    /// Parts that could not be read, so that `concerns` may lack something.
    unknown: Vec<Problem>,
    topics: Part<Vec<TopicStats>>,
    gaps: Option<String>,
}

impl Page {
    fn letters(&self, topic: &TopicStats) -> String {
        address("/letters", &[("filter", &format!("topic = \"{}\"", topic.topic))])
    }

    /// When retention removes the oldest open dead letter.
    fn removal(&self, topic: &TopicStats) -> String {
        match topic.until_removal.as_ref().and_then(from_duration) {
            Some(left) => format!("in {}", html::duration(left.into())),
            None if topic.removal() == Removal::Never => "never".to_owned(),
            None => "–".to_owned(),
        }
    }
}

/// Something that a person should look at.
struct Concern {
    class: &'static str,
    label: &'static str,
    title: String,
    detail: String,
    since: Option<redeliver_client::Timestamp>,
    link: String,
    /// The recommended next step, which the link leads to.
    step: &'static str,
}

pub(crate) async fn page(State(backend): State<Backend>) -> Response {
    let (dead_letters, redrives, controls) = (backend.dead_letters(), backend.redrives(), backend.controls());
    let states = [GroupState::Regressed, GroupState::Open];
    let groups = ListGroupsRequest {
        filter: "state = OPEN".to_owned(),
        page_size: MOST,
        states: states.map(i32::from).to_vec(),
        ..ListGroupsRequest::default()
    };
    let of_redrives = ListRedrivesRequest {
        page_size: MOST,
        ..ListRedrivesRequest::default()
    };
    let (stats, groups, redrives, controls) = tokio::join!(
        dead_letters.stats(""),
        dead_letters.groups(groups),
        redrives.list(of_redrives),
        controls.list(),
    );
    let frame = Frame::new("/", "Now").command("redeliver status").live();
    let mut unknown: Vec<Problem> = Vec::new();
    let mut concerns = Vec::new();
    match groups {
        Ok(answer) => concerns.extend(answer.groups.into_iter().map(of_group)),
        Err(error) => unknown.push(error.into()),
    }
    match redrives {
        Ok(answer) => {
            let paused = answer.redrives.into_iter().filter(|redrive| !redrive.brake.is_empty());
            concerns.extend(paused.map(redrives::Row::of).map(of_redrive));
        }
        Err(error) => unknown.push(error.into()),
    }
    match controls {
        Ok(controls) => concerns.extend(controls.into_iter().filter_map(of_control)),
        Err(error) => unknown.push(error.into()),
    }
    let mut missing = None;
    let topics = match stats {
        Ok(stats) => {
            missing = gaps(stats.completeness.as_ref(), frame.now);
            concerns.extend(stats.topics.iter().filter_map(of_expiring));
            let mut topics = stats.topics;
            topics.sort_by_key(|topic| std::cmp::Reverse((topic.open, topic.last_hour)));
            Ok(topics)
        }
        Err(error) => Err(error.into()),
    };
    concerns.sort_by_key(|concern| concern.class != "regressed");
    let page = Page {
        frame,
        concerns,
        unknown,
        topics,
        gaps: missing,
    };
    respond(&page, axum::http::StatusCode::OK)
}

fn of_group(group: Group) -> Concern {
    let is_regressed = group.state() == GroupState::Regressed;
    let since = time(if is_regressed { group.state_time } else { group.first_dead_at });
    let pipeline = group.pipeline.clone();
    let open = group.open.unwrap_or(group.count);
    let row = groups::Row::of(group);
    Concern {
        class: if is_regressed { "regressed" } else { "open" },
        label: if is_regressed { "regressed" } else { "failing" },
        title: row.reason().to_owned(),
        detail: format!("{} open in {pipeline}", html::number(open)),
        since,
        link: row.link,
        step: "look at the group",
    }
}

fn of_redrive(row: redrives::Row) -> Concern {
    Concern {
        class: "regressed",
        label: "redrive paused",
        title: row.redrive.brake.clone(),
        detail: format!(
            "{} of {} done, {} returned",
            html::number(row.redrive.done),
            html::number(row.redrive.total),
            html::number(row.redrive.returned)
        ),
        since: time(row.redrive.changed_at),
        link: row.link,
        step: "see what came back",
    }
}

fn of_control(control: Control) -> Option<Concern> {
    let state = match control.effective.as_ref()? {
        control::Effective::EffectiveApplication(application) => application.state(),
        control::Effective::EffectivePipeline(pipeline) => pipeline.state(),
        control::Effective::EffectiveTier(tier) => tier.state(),
    };
    (state == RunState::Paused).then(|| Concern {
        class: "paused",
        label: "paused",
        title: control.name.clone(),
        detail: match (control.changed_by.as_str(), control.why.as_str()) {
            ("", _) => "by the configuration".to_owned(),
            (by, "") => format!("by {by}"),
            (by, why) => format!("by {by}: {why}"),
        },
        since: time(control.changed_at),
        link: address("/audit", &[("target", &control.name), ("since", "30d")]),
        step: "see who and why",
    })
}

fn of_expiring(topic: &TopicStats) -> Option<Concern> {
    let left = topic.until_removal.as_ref().and_then(from_duration)?;
    let left = std::time::Duration::from(left);
    (topic.open? > 0 && left.as_secs() < EXPIRES_SOON).then(|| Concern {
        class: "regressed",
        label: "expires",
        title: format!("{} loses open dead letters in {}", topic.topic, html::duration(left)),
        detail: format!("{} open", html::number(topic.open.unwrap_or(0))),
        since: time(topic.oldest),
        link: address("/letters", &[("filter", &format!("topic = \"{}\" AND state = OPEN", topic.topic))]),
        step: "redrive or export them",
    })
}
