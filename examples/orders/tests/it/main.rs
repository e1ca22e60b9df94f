//! The handler without Kafka, and the program with it.

#![expect(clippy::disallowed_types, reason = "orders of these tests")]

mod handler;
mod program;

use serde_json::{Value, json};

/// A valid order with these changes.
fn order(changes: Value) -> Value {
    let mut order = json!({
        "order_id": "936da01f-9abd-4d9d-80c7-02af85c822a8",
        "user": "ada",
        "item": "book",
        "quantity": 2,
        "price": 19.9,
        "timestamp": "2026-05-01T12:00:00Z",
        "priority": "normal",
    });
    let (Some(order_fields), Value::Object(changes)) = (order.as_object_mut(), changes) else {
        panic!("objects");
    };
    order_fields.extend(changes);
    order
}

/// Orders that violate the schema, and the field.
fn invalid_orders() -> Vec<(Value, &'static str)> {
    vec![
        (order(json!({ "quantity": 0 })), "/quantity"),
        (order(json!({ "quantity": 10_001 })), "/quantity"),
        (order(json!({ "quantity": 1.5 })), "/quantity"),
        (order(json!({ "priority": "asap" })), "/priority"),
        // Version 1.
        (
            order(json!({ "order_id": "936da01f-9abd-1d9d-80c7-02af85c822a8" })),
            "/order_id",
        ),
        (order(json!({ "timestamp": "yesterday" })), "/timestamp"),
        (order(json!({ "timestamp": "2026-13-01T12:00:00" })), "/timestamp"),
        (order(json!({ "timestamp": "2026-05-01" })), "/timestamp"),
        (order(json!({ "price": "19.90" })), "/price"),
        (order(json!({ "price": -1 })), "/price"),
        (order(json!({ "coupon": "x" })), "the value"),
        (json!([]), "the value"),
    ]
}
