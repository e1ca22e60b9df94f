//! Dead letters whose payload was left out.

use redeliver_core::route::strip_payload;

use super::*;

/// The dead letter of a record of the pipeline, from which the payload was removed this often.
fn stripped(world: &World, position: Position, original: &Dead, times: usize) -> Dead {
    let record = Record {
        position,
        timestamp: Some(Timestamp::from_millis(1_700_000_000_000)),
        key: original.key.clone(),
        value: original.value.clone(),
        headers: original.headers.clone(),
        unreadable_headers: 0,
    };
    let failure = Failure::permanent("output.too-large", "too large");
    let mut letter = reject(&world.pipeline, &record, &failure, Timestamp::from_millis(1));
    for _ in 0..times {
        assert!(strip_payload(&mut letter));
    }
    Dead {
        key: letter.key,
        value: letter.value,
        headers: letter.headers,
    }
}

#[tokio::test]
async fn omitted_payload_is_read_at_origin() {
    let world = World::new("redrive-omitted", "").await;
    let source = world.pipeline.source.clone();
    world.env.recreate_topic(&source, 1).await;
    let original = |number: u8| Dead {
        key: Some(Bytes::from(vec![number, 0, 0xff])),
        value: Some(Bytes::from(vec![number; 100_000])),
        headers: [("tenant", Some(&[number, 0xff][..])), ("tenant", None)]
            .into_iter()
            .collect(),
    };
    let originals: Vec<Dead> = (0..4).map(original).collect();
    let positions = world.env.put(&source, 0, originals.clone()).await;
    // A topic of another team, with the same record.
    let secret = world.env.create_topic("secret", 1).await;
    world.env.put(&secret, 0, vec![original(3)]).await;
    let elsewhere = Position {
        topic: secret,
        ..positions[0].clone()
    };
    let gone = Position {
        offset: 77,
        ..positions[0].clone()
    };
    let letters = vec![
        stripped(&world, positions[0].clone(), &originals[0], 1),
        stripped(&world, positions[1].clone(), &originals[1], 2),
        // Another record is there.
        stripped(&world, positions[2].clone(), &originals[3], 1),
        stripped(&world, gone, &originals[3], 1),
        stripped(&world, elsewhere, &originals[3], 1),
    ];
    world.env.put(&world.dlq, 0, letters).await;
    let mut inspector = world.env.start().await;
    let filter = format!("topic = \"{}\"", world.dlq);
    inspector.until_listed(&filter, 5).await;

    let job = planned(&mut inspector, plan(v1::RedriveKind::Redrive, &filter))
        .await
        .unwrap();
    let refused: Vec<_> = job
        .refused
        .iter()
        .map(|refusal| (refusal.reason(), refusal.count))
        .collect();
    assert_eq!(
        (job.total, refused),
        (4, vec![(v1::RedriveOutcome::PayloadOmitted, 1)])
    );
    assert!(
        job.warnings.iter().any(|warning| warning.contains("left out")),
        "{:?}",
        job.warnings
    );
    start(&mut inspector, &job.id).await;
    let job = until(&mut inspector, &job.id, &ENDED).await;
    assert_eq!((job.done, job.skipped), (2, 2), "{job:?}");
    assert_eq!(
        outcomes(&mut inspector, &job.id).await,
        [
            v1::RedriveOutcome::Done,
            v1::RedriveOutcome::Done,
            v1::RedriveOutcome::PayloadOmitted,
            v1::RedriveOutcome::PayloadOmitted
        ]
    );
    let mut redriven = world.redriven();
    redriven.sort_by(|one, other| one.key.cmp(&other.key));
    assert_eq!(redriven.len(), 2);
    for (record, original) in redriven.iter().zip(&originals) {
        let user = record.headers.filtered(|name| {
            !redeliver_core::headers::is_reserved(name) && !redrive::is_redrive_header(name)
        });
        assert_eq!((&record.key, &record.value), (&original.key, &original.value));
        assert_eq!(user, original.headers);
        assert_eq!(record.headers.last("payload-omitted"), None);
        assert_eq!(record.headers.last("payload-omitted-hash"), None);
        assert_eq!(record.headers.last("retry-count"), Some(&b"0"[..]));
    }
}
