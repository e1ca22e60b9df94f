use proptest::prelude::*;
use redeliver_testkit::fuzz::fuzz;
use serde_json::{Value, json};

use super::*;

fn avro(text: &str) -> Schema {
    with_references(SchemaFormat::Avro, text, &[])
}

fn with_references(format: SchemaFormat, text: &str, references: &[(&str, &str)]) -> Schema {
    let references = references.iter();
    let source = SchemaSource {
        format,
        text: text.to_owned(),
        references: references
            .map(|(name, text)| ((*name).to_owned(), (*text).to_owned()))
            .collect(),
    };
    Schema::parse(&source).unwrap()
}

fn decoded(schema: &Schema, payload: &[u8]) -> Value {
    serde_json::from_str(&schema.decode(payload).unwrap().text).unwrap()
}

#[test]
fn a_value_with_a_schema_begins_with_a_zero_and_the_id() {
    let framed = Framed::read(&Bytes::from_static(b"\0\x01\x02\x03\x04ab")).unwrap();
    assert_eq!((framed.schema_id, &framed.payload[..]), (0x0102_0304, &b"ab"[..]));
    assert!(Framed::read(&Bytes::from_static(b"\0\0\0\0\x01")).is_some());
    for other in [&b""[..], b"\0\0\0\x01", b"{\"a\":1}", b"\x01\0\0\0\x01"] {
        assert_eq!(Framed::read(&Bytes::copy_from_slice(other)), None);
    }
}

/// All types, as `fastavro` writes them.
#[test]
fn all_types_of_avro_are_decoded() {
    let schema = avro(
        r#"{"type":"record","name":"All","namespace":"n","fields":[
            {"name":"nothing","type":"null"}, {"name":"yes","type":"boolean"}, {"name":"int","type":"int"},
            {"name":"long","type":"long"}, {"name":"float","type":"float"}, {"name":"double","type":"double"},
            {"name":"bytes","type":"bytes"}, {"name":"string","type":"string"},
            {"name":"fixed","type":{"type":"fixed","name":"F","size":2}},
            {"name":"enum","type":{"type":"enum","name":"E","symbols":["A","B"]}},
            {"name":"array","type":{"type":"array","items":"int"}},
            {"name":"map","type":{"type":"map","values":["null","string"]}},
            {"name":"again","type":["null","E"]}, {"name":"next","type":["null","All"]},
            {"name":"decimal","type":{"type":"bytes","logicalType":"decimal","precision":9,"scale":2}},
            {"name":"time","type":{"type":"long","logicalType":"timestamp-millis"}},
            {"name":"uuid","type":{"type":"string","logicalType":"uuid"}}]}"#,
    );
    let one = |next: &[u8]| {
        let mut payload = Vec::new();
        payload.extend(b"\x01"); // yes
        payload.extend(b"\x03"); // int -2
        payload.extend(b"\xfe\xff\xff\xff\xff\xff\xff\xff\xff\x01"); // long: the maximum
        payload.extend(1.5_f32.to_le_bytes());
        payload.extend(f64::NAN.to_le_bytes());
        payload.extend(b"\x04\xff\x00"); // bytes
        payload.extend("\x06\u{1b}ä".as_bytes()); // string of 3 bytes
        payload.extend(b"\x01\x02"); // fixed
        payload.extend(b"\x02"); // enum B
        payload.extend(b"\x03\x04\x02\x04\x02\x06\x00"); // blocks: 2 items with their size, 1 item
        payload.extend(b"\x04\x02a\x00\x02b\x02\x02x\x00"); // map
        payload.extend(b"\x02\x00"); // again: A
        payload.extend(next);
        payload.extend(b"\x04\xff\x85"); // -123
        payload.extend(b"\x02");
        payload.extend(b"\x48");
        payload.extend(b"00000000-0000-0000-0000-000000000001");
        payload
    };
    let whole = one(&[&b"\x02"[..], &one(b"\x00")].concat());
    let value = decoded(&schema, &whole);
    assert_eq!(
        value["next"],
        json!({
            "nothing": null, "yes": true, "int": -2, "long": i64::MAX, "float": 1.5, "double": "NaN", "bytes": "/wA=",
            "string": "\u{1b}ä", "fixed": "AQI=", "enum": "B", "array": [1, 2, 3], "map": {"a": null, "b": "x"}, "again": "A",
            "next": null, "decimal": "-1.23", "time": 1, "uuid": "00000000-0000-0000-0000-000000000001",
        })
    );
    assert_eq!(schema.decode(&whole).unwrap().name, "n.All");
    // Neither too little nor too much.
    for end in 0..whole.len() {
        assert_eq!(schema.decode(&whole[..end]), Err(DecodeError::Mismatch), "{end}");
    }
    assert_eq!(
        schema.decode(&[&whole[..], b"\0"].concat()),
        Err(DecodeError::Mismatch)
    );
}

#[test]
fn a_few_bytes_of_avro_fill_neither_the_memory_nor_the_stack() {
    // An array of 2^62 items without a size.
    let nulls = avro(r#"{"type":"array","items":"null"}"#);
    let bomb = b"\xfe\xff\xff\xff\xff\xff\xff\xff\xff\x01";
    assert_eq!(nulls.decode(bomb), Err(DecodeError::LargeResult));
    let empty = avro(r#"{"type":"array","items":{"type":"record","name":"R","fields":[]}}"#);
    assert_eq!(empty.decode(bomb), Err(DecodeError::LargeResult));
    // A list of a million items.
    let list = avro(r#"{"type":"record","name":"L","fields":[{"name":"n","type":["null","L"]}]}"#);
    assert_eq!(list.decode(&vec![2; 1_000_000]), Err(DecodeError::Mismatch));
    assert_eq!(list.decode(&vec![2; MAX_VALUE + 1]), Err(DecodeError::LargeValue));
    let text = avro(r#""bytes""#);
    let large = [&b"\x80\x80\x70"[..], &vec![0; 917_504]].concat();
    assert_eq!(text.decode(&large), Err(DecodeError::LargeResult));
}

#[test]
fn references_of_avro_are_resolved() {
    let order =
        r#"{"type":"record","name":"Order","namespace":"shop","fields":[{"name":"id","type":"string"}]}"#;
    let cart = r#"{"type":"record","name":"Cart","namespace":"shop","fields":[{"name":"o","type":"Order"}]}"#;
    let schema = with_references(SchemaFormat::Avro, cart, &[("shop.Order", order)]);
    assert_eq!(decoded(&schema, b"\x02x"), json!({"o": {"id": "x"}}));
    let source = SchemaSource {
        format: SchemaFormat::Avro,
        text: cart.to_owned(),
        references: Vec::new(),
    };
    assert!(Schema::parse(&source).is_err());
}

const MONEY: &str = "syntax = \"proto3\"; package shop; message Money { int64 cents = 1; }";
const ORDER: &str =
    "syntax = \"proto3\"; package shop; import \"money.proto\"; import \"google/protobuf/timestamp.proto\";
    message Order { string order_id = 1; Money price = 2; google.protobuf.Timestamp at = 3;
        message Line { int32 n = 1; message Part { bytes b = 1; } } }
    message Other { repeated Order orders = 1; }";

fn protobuf() -> Schema {
    with_references(SchemaFormat::Protobuf, ORDER, &[("money.proto", MONEY)])
}

#[test]
fn messages_of_protobuf_are_decoded_by_the_path_of_their_type() {
    let schema = protobuf();
    let order = b"\x0a\x01x\x12\x02\x08\x07\x1a\x02\x08\x01";
    let json = json!({"orderId": "x", "price": {"cents": "7"}, "at": "1970-01-01T00:00:01Z"});
    // A zero, or the path [0].
    for path in [&b"\0"[..], b"\x02\0"] {
        let payload = [path, order].concat();
        assert_eq!(decoded(&schema, &payload), json);
        assert_eq!(schema.decode(&payload).unwrap().name, "shop.Order");
    }
    assert_eq!(
        decoded(&schema, b"\x02\x02\x0a\x03\x0a\x01y"),
        json!({"orders": [{"orderId": "y"}]})
    );
    let nested = schema.decode(b"\x06\0\0\0\x0a\x01\xff").unwrap();
    assert_eq!(
        (&*nested.name, &*nested.text),
        ("shop.Order.Line.Part", r#"{"b":"/w=="}"#)
    );
    for wrong in [
        &b""[..],
        b"\x02\x04",
        b"\x04\x02\0",
        b"\x03",
        b"\0\x0a\x09x",
        b"\x80",
    ] {
        assert_eq!(schema.decode(wrong), Err(DecodeError::Mismatch), "{wrong:?}");
    }
}

#[test]
fn a_schema_of_json_says_nothing_about_the_document() {
    let schema = with_references(SchemaFormat::Json, "", &[]);
    assert_eq!(
        schema.decode(br#"{"a":1,"a":1.0}"#).unwrap().text,
        r#"{"a":1,"a":1.0}"#
    );
    assert_eq!(schema.decode(b"{"), Err(DecodeError::Mismatch));
}

#[test]
fn schemas_that_cannot_be_used_are_errors() {
    for (format, text) in [
        (SchemaFormat::Avro, "{"),
        (
            SchemaFormat::Avro,
            r#"{"type":"record","name":"R","fields":[{"name":"a","type":"Missing"}]}"#,
        ),
        (SchemaFormat::Protobuf, "message {"),
        (
            SchemaFormat::Protobuf,
            "syntax = \"proto3\"; import \"missing.proto\";",
        ),
    ] {
        let source = SchemaSource {
            format,
            text: text.to_owned(),
            references: Vec::new(),
        };
        assert!(Schema::parse(&source).is_err(), "{text}");
    }
}

fn damaged_values(count: u32) {
    let avro = avro(
        r#"{"type":"record","name":"R","fields":[{"name":"a","type":{"type":"array","items":["null","string","R"]}},
            {"name":"m","type":{"type":"map","values":"double"}}]}"#,
    );
    let protobuf = protobuf();
    let valid = [
        b"\x04\x00\x02\x02x\x00\x00".to_vec(),
        b"\0\x0a\x01x\x12\x02\x08\x07".to_vec(),
    ];
    fuzz("damaged_values", count, &valid, |input| {
        for schema in [&avro, &protobuf] {
            if let Ok(decoded) = schema.decode(input) {
                assert!(
                    serde_json::from_str::<Value>(&decoded.text).is_ok(),
                    "{}",
                    decoded.text
                );
            }
        }
    });
}

#[test]
fn a_damaged_value_is_refused_or_is_json() {
    damaged_values(10_000);
}

#[test]
#[ignore = "long"]
fn many_damaged_values_are_refused_or_are_json() {
    damaged_values(1_000_000);
}

proptest! {
    #[test]
    fn strings_and_numbers_of_avro_survive(number: i64, text in ".{0,20}") {
        let schema = avro(r#"{"type":"record","name":"R","fields":[{"name":"n","type":"long"},{"name":"t","type":"string"}]}"#);
        let mut payload = Vec::new();
        let mut push = |number: i64| {
            let mut bits = ((number << 1) ^ (number >> 63)).cast_unsigned();
            while bits >= 0x80 {
                payload.push((bits & 0x7f) as u8 | 0x80);
                bits >>= 7;
            }
            payload.push(u8::try_from(bits).unwrap());
        };
        push(number);
        push(i64::try_from(text.len()).unwrap());
        payload.extend(text.as_bytes());
        prop_assert_eq!(decoded(&schema, &payload), json!({"n": number, "t": text}));
    }
}
