//! The life of a record as a picture to scale.
//!
//! A life has attempts of milliseconds and months among the dead. A gap is cut that is more than 20 times as long as all shorter ones
//! together, if these take at least a second, and so is each longer one: it has a fixed width, a break and its length.

use std::fmt::Write as _;
use std::time::Duration;

use askama::filters::Safe;
use redeliver_client::Timestamp;
use redeliver_client::convert::time;
use redeliver_client::messages::{PipelineTrace, TraceEvent, TraceOutcome, TraceStep};

use crate::html;

/// The last steps that a picture has. All are in the list.
const MOST: usize = 100;
/// The widths of a cut gap and of all of them together, as percentages, as are the following.
const CUT: f64 = 9.0;
const ALL_CUT: f64 = 60.0;
/// The place of the first and of the last moment.
const ENDS: (f64, f64) = (3.0, 97.0);
/// What a character takes of a narrow picture.
const CHARACTER: f64 = 2.0;
/// Where the axis is.
const AXIS: u32 = 40;

/// What a record does: its name, its class and its height, because colour is not the only sign.
type Phase = (&'static str, &'static str, u32);
const WORKS: Phase = ("queued, or an attempt", "works", 14);
const WAITS: Phase = ("waits", "waits", 8);
const DEAD: Phase = ("dead", "dead", 4);
const ENDED: Phase = ("ended", "ended", 1);
const UNKNOWN: Phase = ("not known", "ended", 1);

pub(crate) struct Timeline {
    pub(crate) svg: Safe<String>,
    pub(crate) spans: Vec<Span>,
    pub(crate) has_cuts: bool,
}

/// From one moment to the next.
pub(crate) struct Span {
    /// What it begins with: the number of a step, or `now`.
    pub(crate) mark: String,
    pub(crate) from: Timestamp,
    pub(crate) phase: Phase,
    lasts: Duration,
    is_cut: bool,
}

impl Span {
    pub(crate) fn length(&self) -> String {
        html::duration(self.lasts)
    }
}

struct Moment {
    mark: String,
    /// That of a step; `None`: now, or what comes next.
    class: Option<&'static str>,
    time: Timestamp,
    phase: Option<Phase>,
}

/// `None` if fewer than two moments are known.
pub(crate) fn timeline(trace: &PipelineTrace, now: Timestamp) -> Option<Timeline> {
    let moments = moments(trace, now);
    let gaps: Vec<Duration> = moments
        .windows(2)
        .map(|pair| pair[1].time.since(pair[0].time))
        .collect();
    let longest = longest_to_scale(&gaps)?;
    let mut phase = UNKNOWN;
    let mut spans = Vec::new();
    for (moment, lasts) in moments.iter().zip(gaps) {
        phase = moment.phase.unwrap_or(phase);
        spans.push(Span {
            mark: moment.mark.clone(),
            from: moment.time,
            phase,
            lasts,
            is_cut: lasts > longest,
        });
    }
    Some(Timeline {
        svg: draw(&moments, &spans),
        has_cuts: spans.iter().any(|span| span.is_cut),
        spans,
    })
}

/// The steps in their order, now, and what comes next. Clocks differ, so a step can have an earlier time than the one before: both are drawn at the same place.
fn moments(trace: &PipelineTrace, now: Timestamp) -> Vec<Moment> {
    let steps = trace
        .steps
        .iter()
        .enumerate()
        .skip(trace.steps.len().saturating_sub(MOST));
    let steps = steps.filter_map(|(index, step)| {
        Some(Moment {
            mark: (index + 1).to_string(),
            class: Some(super::class(step.event())),
            time: time(step.time)?,
            phase: Some(match trace.outcome() {
                TraceOutcome::Unknown if index + 1 == trace.steps.len() => UNKNOWN,
                // In another pipeline, it is a new record.
                TraceOutcome::Redriven if index + 1 == trace.steps.len() => ENDED,
                _ => after(step),
            }),
        })
    });
    let mut moments: Vec<Moment> = steps.collect();
    if !moments.is_empty() {
        let next = time(trace.next_due).filter(|next| *next > now);
        let others = [("now", Some(now)), ("next", next)].into_iter();
        moments.extend(others.filter_map(|(mark, time)| {
            Some(Moment {
                mark: mark.to_owned(),
                class: None,
                time: time?,
                phase: None,
            })
        }));
    }
    let mut latest = moments.first().map(|moment| moment.time);
    for moment in &mut moments {
        latest = latest.max(Some(moment.time));
        moment.time = latest.unwrap_or(moment.time);
    }
    moments
}

fn after(step: &TraceStep) -> Phase {
    match step.event() {
        TraceEvent::Entered | TraceEvent::Released | TraceEvent::Redriven => WORKS,
        TraceEvent::Waits => WAITS,
        TraceEvent::Died | TraceEvent::Restored => DEAD,
        TraceEvent::Succeeded | TraceEvent::Discarded => ENDED,
        TraceEvent::Unspecified => UNKNOWN,
    }
}

/// The longest gap that is not cut. `None` without a gap.
fn longest_to_scale(gaps: &[Duration]) -> Option<Duration> {
    let mut sorted = gaps.to_vec();
    sorted.sort();
    let mut shorter = Duration::ZERO;
    let mut longest = None;
    for gap in sorted {
        if shorter >= Duration::from_secs(1) && gap > shorter.saturating_mul(20) {
            break;
        }
        longest = Some(gap);
        shorter = shorter.saturating_add(gap);
    }
    longest
}

/// Where each moment is.
#[expect(clippy::cast_precision_loss, reason = "a picture")]
fn places(spans: &[Span]) -> Vec<f64> {
    let cuts = spans.iter().filter(|span| span.is_cut).count() as f64;
    let of_cut = CUT.min(ALL_CUT / cuts.max(1.0));
    let to_scale: f64 = spans
        .iter()
        .filter(|span| !span.is_cut)
        .map(|span| span.lasts.as_secs_f64())
        .sum();
    let per_second = (ENDS.1 - ENDS.0 - cuts * of_cut) / to_scale.max(f64::MIN_POSITIVE);
    let mut places = vec![ENDS.0];
    let mut at = ENDS.0;
    for span in spans {
        at += if span.is_cut {
            of_cut
        } else {
            span.lasts.as_secs_f64() * per_second
        };
        places.push(at.min(ENDS.1));
    }
    places
}

fn draw(moments: &[Moment], spans: &[Span]) -> Safe<String> {
    let places = places(spans);
    let mut svg = format!(
        "<svg class=\"timeline\" role=\"img\" aria-label=\"Life of the record: a table with {} rows follows\">",
        spans.len()
    );
    let spans = || spans.iter().zip(places.windows(2));
    for (span, ends) in spans() {
        let (_, class, height) = span.phase;
        let (from, width, y) = (ends[0], ends[1] - ends[0], AXIS - height / 2);
        let _ = write!(
            svg,
            "<rect class=\"{class}\" x=\"{from:.2}%\" y=\"{y}\" width=\"{width:.2}%\" height=\"{height}\"/>"
        );
        if span.is_cut {
            let at = from + width / 2.0;
            let _ = write!(
                svg,
                "<svg class=\"break\" x=\"{at:.2}%\" y=\"{AXIS}\"><path d=\"M-6 10 0-10M0 10 6-10\"/></svg>"
            );
        }
    }
    // What the picture does not tell otherwise is labelled first.
    let (mut marks, mut lengths) = (Labels::new([26, 14, 2]), Labels::new([62, 75, 88]));
    let (steps, others): (Vec<_>, Vec<_>) = moments
        .iter()
        .zip(&places)
        .partition(|(moment, _)| moment.class.is_some());
    for (moment, at) in others.into_iter().chain(steps) {
        let _ = match moment.class {
            None => write!(
                svg,
                "<line class=\"now\" x1=\"{at:.2}%\" x2=\"{at:.2}%\" y1=\"28\" y2=\"52\"/>"
            ),
            Some(class) => write!(
                svg,
                "<circle class=\"{class}\" cx=\"{at:.2}%\" cy=\"{AXIS}\" r=\"5\"/>"
            ),
        };
        marks.add(&mut svg, &moment.mark, *at, 100.0);
    }
    let (cut, others): (Vec<_>, Vec<_>) = spans().partition(|(span, _)| span.is_cut);
    for (span, ends) in cut.into_iter().chain(others) {
        let room = if span.is_cut { 100.0 } else { ends[1] - ends[0] };
        lengths.add(&mut svg, &span.length(), ends[0].midpoint(ends[1]), room);
    }
    svg.push_str("</svg>");
    Safe(svg)
}

/// Labels in three lines, as far as there is room.
struct Labels([(u32, Vec<(f64, f64)>); 3]);

impl Labels {
    fn new(lines: [u32; 3]) -> Self {
        Self(lines.map(|y| (y, Vec::new())))
    }

    #[expect(clippy::cast_precision_loss, reason = "a picture")]
    fn add(&mut self, svg: &mut String, label: &str, at: f64, room: f64) {
        let half = label.len() as f64 * CHARACTER / 2.0;
        let at = at.max(half).min(100.0 - half);
        let is_free = |taken: &(f64, f64)| at + half < taken.0 || taken.1 < at - half;
        let mut lines = self.0.iter_mut();
        let free = lines.find(|(_, taken)| 2.0 * half <= room && taken.iter().all(is_free));
        if let Some((y, taken)) = free {
            taken.push((at - half, at + half));
            let _ = write!(svg, "<text x=\"{at:.2}%\" y=\"{y}\">{label}</text>");
        }
    }
}

#[cfg(test)]
mod tests {
    use redeliver_client::convert::to_timestamp;

    use super::*;

    #[test]
    fn only_dominating_gaps_are_cut() {
        const HOUR: u64 = 3_600_000;
        for (gaps, longest) in [
            (&[20, 5_000, 20, 30_000, 20, 60_000][..], 60_000),
            (&[5_000, 48 * HOUR, 30_000, 60_000, 8 * HOUR], 60_000),
            (&[0, 48 * HOUR], 48 * HOUR),
            (&[5_000, 30_000, 60_000, 24 * HOUR, 48 * HOUR], 60_000),
            (&[48 * HOUR, 100], 48 * HOUR),
            (&[0, 0], 0),
            (&[u64::MAX, u64::MAX, 1], u64::MAX),
        ] {
            let durations: Vec<Duration> = gaps.iter().copied().map(Duration::from_millis).collect();
            assert_eq!(
                longest_to_scale(&durations),
                Some(Duration::from_millis(longest)),
                "{gaps:?}"
            );
        }
        assert_eq!(longest_to_scale(&[]), None);
    }

    #[test]
    fn gaps_keep_proportions_and_order() {
        let steps = [0, 1_000, 4_000, 4_000, 1_000_000].map(|millis| (TraceEvent::Entered, millis));
        let life = timeline(
            &trace(&steps, TraceOutcome::New),
            Timestamp::from_millis(1_000_000),
        )
        .unwrap();
        let places = places(&life.spans);
        assert!(
            places.is_sorted() && places.len() == 6 && places[5] <= ENDS.1,
            "{places:?}"
        );
        let width = |index: usize| places[index + 1] - places[index];
        assert!((width(1) / width(0) - 3.0).abs() < 1e-9, "{places:?}");
        assert!((width(3) - CUT).abs() < 1e-9 && life.has_cuts, "{places:?}");
    }

    fn trace(steps: &[(TraceEvent, i64)], outcome: TraceOutcome) -> PipelineTrace {
        let step = |(event, millis): &(TraceEvent, i64)| TraceStep {
            event: (*event).into(),
            time: Some(to_timestamp(Timestamp::from_millis(*millis))),
            error_message: "<script>\u{202e}".to_owned(),
            ..TraceStep::default()
        };
        PipelineTrace {
            steps: steps.iter().map(step).collect(),
            outcome: outcome.into(),
            ..PipelineTrace::default()
        }
    }

    #[test]
    fn life_goes_on_until_next_attempt() {
        let mut waits = trace(
            &[(TraceEvent::Entered, 1_000), (TraceEvent::Waits, 1_020)],
            TraceOutcome::Waits,
        );
        waits.next_due = Some(to_timestamp(Timestamp::from_millis(31_020)));
        let life = timeline(&waits, Timestamp::from_millis(11_020)).unwrap();
        let spans: Vec<(&str, Phase, u128)> = life
            .spans
            .iter()
            .map(|span| (span.mark.as_str(), span.phase, span.lasts.as_millis()))
            .collect();
        let expected = [("1", WORKS, 20), ("2", WAITS, 10_000), ("now", WAITS, 20_000)];
        assert_eq!(spans, expected);
        for shown in [
            ">1</text>",
            ">2</text>",
            ">now</text>",
            ">next</text>",
            ">20 s</text>",
        ] {
            assert!(life.svg.0.contains(shown), "{shown} is not in {}", life.svg.0);
        }
    }

    #[test]
    fn ends_of_lives_are_told_apart() {
        for (event, outcome, expected) in [
            (TraceEvent::Died, TraceOutcome::Dead, DEAD),
            (TraceEvent::Redriven, TraceOutcome::New, WORKS),
            (TraceEvent::Redriven, TraceOutcome::Redriven, ENDED),
            (TraceEvent::Discarded, TraceOutcome::Discarded, ENDED),
            (TraceEvent::Released, TraceOutcome::Unknown, UNKNOWN),
        ] {
            // The clock of the step before was ahead.
            let steps = [(TraceEvent::Released, 50), (event, 0)];
            let life = timeline(&trace(&steps, outcome), Timestamp::from_millis(1_000)).unwrap();
            assert_eq!(life.spans.last().unwrap().phase, expected, "{event:?}");
        }
    }

    #[test]
    fn pictures_of_any_life_are_bounded() {
        assert!(timeline(&PipelineTrace::default(), Timestamp::from_millis(0)).is_none());
        // A clock that is ahead, and times from the first to the last year.
        let many: Vec<(TraceEvent, i64)> = (0..1_000)
            .map(|index| {
                (
                    TraceEvent::Waits,
                    if index % 2 == 0 { i64::MIN } else { i64::MAX },
                )
            })
            .collect();
        for trace in [
            trace(&many, TraceOutcome::Waits),
            trace(&many[..1], TraceOutcome::Waits),
        ] {
            let life = timeline(&trace, Timestamp::from_millis(5)).unwrap();
            let svg = life.svg.0;
            assert!(life.spans.len() <= MOST && svg.len() < 40_000, "{}", svg.len());
            assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        }
    }
}
