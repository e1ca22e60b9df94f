use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, UNIX_EPOCH};

use orders::{Catalogue, Confirmation, EXPRESS};
use redeliver_worker::Attempt;
use redeliver_worker::test_kit::{End, TestKit, TestRecord, TestRun};
use serde_json::{Value, json};

use crate::{invalid_orders, order};

const NOW: u64 = 1_700_000_000;
const HOUR: u64 = 3_600;

/// Every attempt is an hour after the one before.
async fn run(catalogue: Catalogue, order: &Value) -> TestRun {
    let schema = concat!(env!("CARGO_MANIFEST_DIR"), "/order.schema.json");
    let yaml = include_str!("../../orders.yaml").replace("examples/orders/order.schema.json", schema);
    let kit = TestKit::from_yaml(&yaml, "orders").unwrap();
    let hours = Arc::new(AtomicU64::new(0));
    let confirm = move |attempt: Attempt| {
        let now = NOW + HOUR * hours.fetch_add(1, Ordering::Relaxed);
        let outcome = catalogue.confirm(&attempt, UNIX_EPOCH + Duration::from_secs(now));
        async move { outcome }
    };
    kit.run(confirm, TestRecord::value(order.to_string())).await
}

fn code(run: &TestRun) -> &str {
    match &run.end {
        End::Dead(letter) => &letter.failure.code,
        End::Succeeded(_) => "",
    }
}

#[tokio::test]
async fn urgent_order_has_another_topic() {
    for (priority, topic) in [
        ("low", "orders-confirmed"),
        ("high", EXPRESS),
        ("urgent", EXPRESS),
    ] {
        let run = run(Catalogue::default(), &order(json!({ "priority": priority }))).await;
        let End::Succeeded(results) = run.end else {
            panic!("{run:?}")
        };
        assert_eq!((results.len(), &*results[0].topic), (1, topic));
        let confirmation: Confirmation = serde_json::from_slice(results[0].value.as_ref().unwrap()).unwrap();
        assert_eq!(confirmation.total, 3_980);
    }
}

#[tokio::test]
async fn price_and_offset_are_optional() {
    let mut without_price = order(json!({}));
    without_price.as_object_mut().unwrap().remove("price");
    for order in [
        without_price,
        order(json!({ "price": null })),
        order(json!({ "price": 19.900000000000002 })),
        order(json!({ "timestamp": "2026-05-01T12:00:00.123456" })),
        order(json!({ "timestamp": "2026-05-01T12:00:00+02:00" })),
    ] {
        let run = run(Catalogue::default(), &order).await;
        assert_eq!((code(&run), run.attempts), ("", 1), "{order} {run:?}");
    }
}

#[tokio::test]
async fn invalid_order_dies_at_once() {
    for (order, field) in invalid_orders() {
        let run = run(Catalogue::default(), &order).await;
        assert_eq!((code(&run), run.attempts), ("schema.invalid", 1), "{order}");
        let End::Dead(letter) = run.end else {
            unreachable!()
        };
        let message = letter.failure.message;
        assert!(message.starts_with(&format!("{field} violates ")), "{message}");
    }
}

#[tokio::test]
async fn unconfirmable_order_dies_at_once() {
    for (changes, expected) in [
        (json!({ "item": "cup" }), "orders.unknown-item"),
        (json!({ "price": 1 }), "orders.price-changed"),
        (json!({ "price": 19.91 }), "orders.price-changed"),
    ] {
        let run = run(Catalogue::default(), &order(changes)).await;
        assert_eq!((code(&run), run.attempts), (expected, 1));
    }
}

#[tokio::test]
async fn unavailable_article_uses_no_attempts() {
    let lamp = order(json!({ "item": "lamp", "price": 49 }));
    let run = run(Catalogue::with_lamp_from(NOW + HOUR), &lamp).await;
    assert_eq!((code(&run), run.attempts), ("", 2), "{run:?}");
    // Records that wait for the same time do not come back all at once.
    let hour = Duration::from_secs(HOUR);
    assert!(
        run.waits[0] >= hour && run.waits[0] <= hour.mul_f64(1.2),
        "{run:?}"
    );
    let End::Succeeded(results) = run.end else {
        unreachable!()
    };
    assert_eq!(results[0].headers.last("retry-count"), Some(&b"0"[..]));
}
