mod passes;
mod properties;
mod world;

use bytes::Bytes;
use redeliver_core::headers::{ORIGINAL_OFFSET, PIPELINE, TRACEPARENT};
use redeliver_core::outcome::Produced;
use redeliver_core::route::{reject, strip_payload};
use redeliver_core::{Failure, Headers, Output};

use self::world::{
    Change, Location, START, World, all_locations, check, defects, redrive, redrive_with, set_header,
    with_scheduler,
};
use super::*;

#[test]
fn correct_run_counts_records_once() {
    for return_to in [ReturnTo::Due, ReturnTo::Source] {
        let report = check(&all_locations(return_to), &[]);
        assert_eq!((report.source, report.output, report.dead), (5, 1, 1));
        let waiting = &report.waiting;
        assert_eq!((waiting.in_source, waiting.in_tiers, waiting.in_due), (1, 1, 1));
        assert_eq!(report.dead_by_class, [("permanent".to_owned(), 1)].into());
        assert_eq!(report.retries, [(1, 1), (2, 1)].into());
        assert_eq!(report.min_margin_ms, Some(4));
        assert_eq!(report.lateness.unwrap().max_ms, 4);
        assert!(
            report.foreign.is_empty() && report.source_gone == 0 && report.newer == 0,
            "{report}"
        );
    }
}

#[test]
fn record_in_scheduler_is_waiting() {
    for return_to in [ReturnTo::Due, ReturnTo::Source] {
        let mut world = with_scheduler(return_to);
        for (failures, location) in [
            (1, Location::Output),
            (2, Location::Dead),
            (1, Location::WaitsInTier),
            (2, Location::WaitsInTier),
            (1, Location::WaitsInDue),
        ] {
            world.add(failures, location, 4);
        }
        let report = check(&world, &[]);
        assert_eq!((report.source, report.output, report.dead), (5, 1, 1));
        let waiting = &report.waiting;
        assert_eq!(
            (waiting.in_scheduler, waiting.in_tiers, waiting.in_due),
            (1, 1, 1)
        );
        assert_eq!(report.min_margin_ms, Some(4));
    }
    let mut world = with_scheduler(ReturnTo::Due);
    world.add(1, Location::Output, 0);
    world.last_of(Role::Due).key = None;
    let report = check(&world, &[("altered", 1)]);
    let reason = &report.altered.sample[0].reason;
    assert!(reason.contains("key or headers differ"), "{report}");
}

#[test]
fn unreturned_record_is_lost() {
    let mut world = with_scheduler(ReturnTo::Due);
    world.add(1, Location::WaitsInTier, 0);
    check(&world, &[]);
    world.seen.last_mut().unwrap().unread = false;
    let report = check(&world, &[("lost", 1)]);
    let reason = &report.lost.sample[0].reason;
    assert!(reason.starts_with("was last seen with the scheduler"), "{report}");
}

#[test]
fn job_of_ended_record_is_doubled() {
    let mut world = with_scheduler(ReturnTo::Due);
    world.add(1, Location::Output, 0);
    let [source, command, back, end] = &world.seen[..] else {
        panic!("{:?}", world.seen)
    };
    let mut ledger = world.ledger();
    ledger.positions_known();
    let job = ledger.scheduled(&command.record, false).unwrap();
    ledger.source(&source.record, false);
    assert_eq!(defects(&ledger.report()), [("lost", 1)]);
    ledger.still_scheduled(job);
    let report = ledger.report();
    assert!(report.is_clean() && report.waiting.in_scheduler == 1, "{report}");
    // The job was dispatched after the state topic was read.
    ledger.due(&back.record, true);
    let report = ledger.report();
    assert!(report.is_clean() && report.waiting.in_due == 1, "{report}");

    // If the record had ended before, it is going to end a second time.
    let mut ledger = world.ledger();
    ledger.output(&end.record);
    ledger.positions_known();
    let job = ledger.scheduled(&command.record, false).unwrap();
    ledger.still_scheduled(job);
    ledger.source(&source.record, false);
    assert_eq!(defects(&ledger.report()), [("doubled", 1)]);
}

#[test]
fn record_in_no_topic_is_lost() {
    for (failures, last) in [
        (0, "was only seen in the source"),
        (2, "was last seen in the due topic"),
    ] {
        let mut world = all_locations(ReturnTo::Due);
        let record = world.plain();
        let origin = record.position.to_string();
        world.live(record, failures, Location::Output, 0);
        world.seen.pop();
        let report = check(&world, &[("lost", 1)]);
        assert_eq!(report.lost.sample[0].origin, origin);
        assert!(report.lost.sample[0].reason.starts_with(last), "{report}");
        assert!(report.to_string().contains("NOT CLEAN: lost"));
    }
}

#[test]
fn record_with_two_ends_is_doubled() {
    for (from, to) in [
        (Role::Output, Role::Output),
        (Role::Dead, Role::Dead),
        (Role::Output, Role::Dead),
    ] {
        let mut world = all_locations(ReturnTo::Due);
        let mut second = world.second_copy(from);
        second.role = to;
        let at = second.record.position.to_string();
        world.seen.push(second);
        let report = check(&world, &[("doubled", 1)]);
        assert_eq!(report.doubled.sample[0].at, Some(at));
    }
}

#[test]
fn ended_and_waiting_record_is_doubled() {
    for role in [Role::Source, Role::Tier, Role::Due] {
        let mut world = World::with_one(ReturnTo::Due, 1, Location::Output);
        let seen = world.seen.iter_mut().find(|seen| seen.role == role).unwrap();
        seen.unread = true;
        check(&world, &[("doubled", 1)]);
    }
}

#[test]
fn later_end_is_not_doubled() {
    let world = World::with_one(ReturnTo::Due, 0, Location::Output);
    let mut ledger = world.ledger();
    ledger.positions_known();
    ledger.source(&world.seen[0].record, true);
    ledger.output(&world.seen[1].record);
    let report = ledger.report();
    assert!(report.is_clean() && report.output == 1, "{report}");
}

#[test]
fn release_one_millisecond_before_is_early() {
    for return_to in [ReturnTo::Due, ReturnTo::Source] {
        let mut world = World::with_one(return_to, 1, Location::WaitsInDue);
        check(&world, &[]);
        let released = &mut world.seen.last_mut().unwrap().record;
        released.timestamp = Some(Timestamp::from_millis(
            released.timestamp.unwrap().as_millis() - 1,
        ));
        let report = check(&world, &[("early", 1)]);
        assert_eq!(report.min_margin_ms, Some(-1));
        assert!(report.early.sample[0].reason.contains("1 ms before"), "{report}");
    }
}

#[test]
fn release_before_distant_due_is_early() {
    let mut world = World::with_one(ReturnTo::Due, 1, Location::WaitsInDue);
    set_header(
        world.last_of(Role::Due),
        PROCESS_AFTER,
        "2999-01-01T00:00:00.000Z",
    );
    check(&world, &[("early", 1)]);
}

#[test]
fn changed_copy_is_altered_everywhere() {
    let roles = [Role::Source, Role::Tier, Role::Due, Role::Output, Role::Dead];
    let changes = |role| {
        Change::ALL
            .into_iter()
            .enumerate()
            .map(move |change| (role, change))
    };
    for (role, (number, change)) in roles.into_iter().flat_map(changes) {
        let end = match role {
            Role::Dead => Location::Dead,
            _ => Location::Output,
        };
        let mut world = World::with_one(ReturnTo::Due, 1, end);
        change.apply(world.last_of(role));
        for _ in 0..2 {
            let report = check(&world, &[("altered", 1)]);
            let found = &report.altered.sample[0].reason;
            assert!(
                found.contains(change.reason()),
                "change {number} in {role}: {report}"
            );
            world.seen.reverse();
        }
    }
}

#[test]
fn handlers_change_only_their_parts() {
    let mut world = World::with_one(ReturnTo::Due, 1, Location::Output);
    world.last_of(Role::Output).value = None;
    check(&world, &[("altered", 1)]);
    assert!(world.report_with(HandlerChanges::Value).is_clean());
    world.last_of(Role::Output).key = None;
    assert_eq!(
        defects(&world.report_with(HandlerChanges::Value)),
        [("altered", 1)]
    );
    assert!(world.report_with(HandlerChanges::Anything).is_clean());
    world.last_of(Role::Tier).key = None;
    assert_eq!(
        defects(&world.report_with(HandlerChanges::Anything)),
        [("altered", 1)],
        "a tier must not change a record"
    );
}

/// A world in which the handler has replaced the value of a record with these headers, and set these.
fn replaced(of_record: &[(&str, &str)], set: &[(&str, &str)]) -> World {
    let headers = |pairs: &[(&str, &str)]| -> Headers {
        let pairs = pairs.iter();
        pairs
            .map(|(name, value)| (*name, Some(value.as_bytes())))
            .collect()
    };
    let result = Produced {
        headers: headers(set),
        ..Produced::value(Some(Bytes::from_static(b"answer")))
    };
    let mut world = World::new(ReturnTo::Due);
    let record = world.source(Some(b"k"), Some(b"v"), headers(of_record), 0);
    world.live_with(record, 1, Location::Output, 0, result.into());
    world
}

const JSON: (&str, &str) = ("content-type", "application/json");

#[test]
fn results_may_change_content_type() {
    for of_record in [
        &[("tenant", "a")][..],
        &[JSON, ("tenant", "a")],
        &[("tenant", "a"), JSON],
        &[("Content-Type", "text/csv"), ("tenant", "a"), ("x", "")],
        &[],
    ] {
        for set in [&[JSON][..], &[("content-type", "text/plain")], &[]] {
            let world = replaced(of_record, set);
            let report = world.report_with(HandlerChanges::Value);
            assert!(
                report.is_clean() && report.output == 1,
                "{of_record:?}, {set:?}: {report}"
            );
        }
    }
}

#[test]
fn results_without_user_headers_are_altered() {
    let of_record = [("tenant", "a"), JSON, ("tenant", "b")];
    for lost in 0..4 {
        let mut world = replaced(&of_record, &[JSON]);
        let result = world.last_of(Role::Output);
        let headers = result.headers.clone();
        let mut user = 0;
        let kept = headers.iter().filter(|(name, _)| {
            user += usize::from(*name == "tenant");
            // Also all of them, and two that change places.
            !(*name == "tenant" && (lost == user - 1 || lost == 2))
        });
        result.headers = kept.collect();
        if lost == 3 {
            let places = [("tenant", Some(&b"b"[..])), ("tenant", Some(b"a"))];
            let others = headers.iter().filter(|(name, _)| *name != "tenant");
            result.headers = places.into_iter().chain(others).collect();
        }
        assert_eq!(
            defects(&world.report_with(HandlerChanges::Value)),
            [("altered", 1)],
            "{lost}"
        );
    }
}

#[test]
fn only_custom_handlers_add_headers() {
    let world = replaced(&[("tenant", "a")], &[("x-added", "1")]);
    let report = world.report_with(HandlerChanges::Value);
    assert_eq!(defects(&report), [("altered", 1)]);
    assert!(world.report_with(HandlerChanges::Anything).is_clean());
}

#[test]
fn content_types_are_compared() {
    for role in [Role::Tier, Role::Due, Role::Dead] {
        for change in 0..3 {
            let mut world = World::new(ReturnTo::Due);
            let headers = [JSON, ("tenant", "a")];
            let headers = headers
                .into_iter()
                .map(|(name, value)| (name, Some(value.as_bytes())));
            let record = world.source(None, Some(b"v"), headers.collect(), 0);
            world.live(record, 1, Location::Dead, 0);
            assert!(world.report_with(HandlerChanges::Value).is_clean());
            let copy = world.last_of(role);
            match change {
                0 => copy.headers = copy.headers.filtered(|name| name != "content-type"),
                1 => set_header(copy, "content-type", "text/plain"),
                // Behind the other one.
                _ => set_header(copy, "content-type", "application/json"),
            }
            let report = world.report_with(HandlerChanges::Value);
            assert_eq!(defects(&report), [("altered", 1)], "{role}, {change}");
        }
    }
}

#[test]
fn trace_context_may_change() {
    let mut world = World::new(ReturnTo::Due);
    let headers = [(TRACEPARENT, Some(&b"old"[..])), ("tracestate", Some(&b"s"[..]))];
    let record = world.source(None, None, headers.into_iter().collect(), 0);
    world.live(record, 1, Location::Output, 0);
    check(&world, &[]);
}

#[test]
fn forged_record_is_foreign() {
    let mut world = all_locations(ReturnTo::Due);
    let tier = world.pipeline.tier_topic(HumanDuration::from_secs(5));
    let headers = [(PROCESS_AFTER, Some(&b"now"[..]))].into_iter().collect();
    let forged = Output {
        topic: tier,
        partition: None,
        key: None,
        value: Some(Bytes::from_static(b"?")),
        headers,
    };
    let record = world.write(Role::Tier, forged, 0, START);
    let letter = reject(&world.pipeline, &record, &Failure::malformed("x", "y"), START);
    world.write(Role::Dead, letter, 0, START);
    let report = check(&world, &[]);
    assert_eq!((report.foreign.count, report.dead), (2, 1));
    assert!(
        report.foreign.sample[1].origin.starts_with("docs-retry-5s/0/"),
        "{report}"
    );
}

#[test]
fn other_producers_record_is_foreign() {
    let mut world = all_locations(ReturnTo::Due);
    let mut other = world.second_copy(Role::Output);
    set_header(&mut other.record, PIPELINE, "other");
    world.seen.push(other.clone());
    other.record.headers = Headers::new();
    world.seen.push(other);
    let report = check(&world, &[]);
    assert_eq!((report.foreign.count, report.output), (2, 1));
}

#[test]
fn end_without_source_is_unknown() {
    let mut world = all_locations(ReturnTo::Due);
    set_header(world.last_of(Role::Output), ORIGINAL_OFFSET, "999999999");
    check(&world, &[("lost", 1), ("unknown", 1)]);
}

#[test]
fn deleted_source_records_are_clean() {
    let mut world = all_locations(ReturnTo::Due);
    world.add(0, Location::Output, 0);
    world
        .seen
        .retain(|seen| seen.role != Role::Source || seen.record.position.offset > 6);
    let report = check(&world, &[]);
    assert_eq!(
        (report.source, report.output, report.source_gone),
        (1, 1, 4),
        "{report}"
    );
}

#[test]
fn end_of_newer_record_is_clean() {
    let mut world = all_locations(ReturnTo::Due);
    world.add(0, Location::Output, 0);
    let newer = world.seen.pop().unwrap();
    world.seen.pop();
    let mut ledger = world.ledger();
    ledger.positions_known();
    world
        .seen
        .iter()
        .filter(|seen| seen.role == Role::Source)
        .for_each(|seen| ledger.source(&seen.record, true));
    ledger.output(&newer.record);
    let report = ledger.report();
    assert!(report.is_clean() && report.newer == 1, "{report}");
}

#[test]
fn successes_need_an_output_topic() {
    let mut world = all_locations(ReturnTo::Due);
    world.pipeline.output = None;
    world.seen.retain(|seen| seen.role != Role::Output);
    let report = check(&world, &[]);
    assert_eq!((report.uncounted, report.successes_counted), (1, false));
    assert!(
        report
            .to_string()
            .contains("successes without a result cannot be counted"),
        "{report}"
    );
    world.seen.push(world.second_copy(Role::Dead));
    check(&world, &[("doubled", 1)]);
}

#[test]
fn last_life_of_redriven_record_counts() {
    let mut world = World::with_one(ReturnTo::Due, 0, Location::Dead);
    for count in [1, 2] {
        let record = redrive(&mut world, count);
        world.live(record, 2 - count, Location::Dead, 0);
    }
    let report = check(&world, &[]);
    assert_eq!((report.source, report.dead, report.redriven), (1, 1, 1));
    let record = redrive(&mut world, 3);
    world.live(record, 0, Location::Output, 0);
    let report = check(&world, &[]);
    assert_eq!(
        (report.source, report.dead, report.output, report.redriven),
        (1, 0, 1, 1)
    );
    let output = world.seen.pop().unwrap();
    check(&world, &[("lost", 1)]);
    world.seen.extend([output.clone(), output]);
    check(&world, &[("doubled", 1)]);
    world.seen.pop();
    for seen in world.seen.iter_mut().rev().take(2) {
        seen.record.value = None;
    }
    let report = check(&world, &[("altered", 1)]);
    assert!(report.altered.sample[0].reason.contains("redrive 3"), "{report}");
}

#[test]
fn edited_parts_may_differ() {
    let edit = |edited: &'static str, change: fn(&mut Record)| {
        move |record: &mut Record| {
            change(record);
            set_header(record, "redrive-of", "docs-dlq/2/1");
            set_header(record, "redrive-edited", edited);
        }
    };
    let value = |record: &mut Record| record.value = None;
    let key = |record: &mut Record| record.key = None;
    let headers = |record: &mut Record| set_header(record, "tenant", "b");
    for (edited, change, is_clean) in [
        ("value", value as fn(&mut Record), true),
        ("key", key, true),
        ("headers", headers, true),
        ("value, headers", headers, true),
        ("value", key, false),
        ("key", value, false),
        ("value", headers, false),
        ("", value, false),
    ] {
        let mut world = World::with_one(ReturnTo::Due, 0, Location::Dead);
        let record = redrive_with(&mut world, 1, edit(edited, change));
        world.live(record, 1, Location::Dead, 0);
        // The next redrive edits nothing. Records from before kept the headers of the edit.
        let record = redrive(&mut world, 2);
        world.live(record, 0, Location::Output, 0);
        let report = world.report();
        assert_eq!(report.is_clean(), is_clean, "{edited}: {report}");
        assert_eq!((report.output, report.redriven), (1, 1));
    }
}

#[test]
fn margins_keep_three_digits() {
    for (margin, kept) in [
        (0, 0),
        (-1, -1),
        (9_999, 9_999),
        (12_345, 12_300),
        (-1_234_567, -1_230_000),
        (i64::MIN, -9_220_000_000_000_000_000),
    ] {
        assert_eq!(rounded(margin), kept);
    }
}

#[test]
fn report_is_json_and_text() {
    let mut world = all_locations(ReturnTo::Due);
    world.seen.retain(|seen| seen.role != Role::Dead);
    let report = world.report();
    let json = serde_json::to_value(&report).unwrap();
    assert_eq!(json["lost"]["count"], 1);
    assert_eq!(json["waiting"]["in_tiers"], 1);
    assert!(json["lost"]["sample"][0]["origin"].is_string());
    assert!(
        report.to_string().contains("  lost                         1"),
        "{report}"
    );
}

#[test]
fn omitted_payload_is_not_altered() {
    for stripped in 0..=2 {
        let mut world = all_locations(ReturnTo::Due);
        let record = world.last_of(Role::Dead);
        let mut letter = Output {
            topic: record.position.topic.clone(),
            partition: None,
            key: record.key.take(),
            value: record.value.take(),
            headers: std::mem::take(&mut record.headers),
        };
        for _ in 0..stripped {
            assert!(strip_payload(&mut letter));
        }
        (record.key, record.value, record.headers) = (letter.key, letter.value, letter.headers);
        check(&world, &[]);
    }
}
