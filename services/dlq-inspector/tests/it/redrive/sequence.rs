//! Jobs that follow each other at once.

use redeliver_proto::v1;

use super::{ENDED, World, get, plan, planned, start};

#[tokio::test]
async fn a_plan_follows_what_was_done_before() {
    let world = World::new("redrive-sequence", "").await;
    world.put(20).await;
    let mut inspector = world.env.start().await;
    inspector.until_listed("", 20).await;
    for kind in [v1::RedriveKind::Discard, v1::RedriveKind::Restore].repeat(2) {
        let job = planned(&mut inspector, plan(kind, "")).await.unwrap();
        assert_eq!((job.total, &*job.warnings), (20, &[][..]));
        start(&mut inspector, &job.id).await;
        // The pauses of `until` would give the index time.
        while !ENDED.contains(&get(&mut inspector, &job.id).await.unwrap().state()) {}
    }
}
