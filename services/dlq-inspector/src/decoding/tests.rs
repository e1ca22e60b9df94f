#![expect(
    clippy::disallowed_types,
    reason = "decoded documents, which these tests compare"
)]

use prost_reflect::DynamicMessage;
use redeliver_testkit::fuzz::{FEW, check_each, fuzz};
use redeliver_testkit::valid_json;
use serde_json::{Value, json};

use super::*;

fn avro(text: &str) -> Schema {
    with_references(SchemaFormat::Avro, text, &[])
}

fn source(format: SchemaFormat, text: &str, references: &[(&str, &str)]) -> SchemaSource {
    let references = references.iter();
    SchemaSource {
        format,
        text: text.to_owned(),
        references: references
            .map(|(name, text)| ((*name).to_owned(), (*text).to_owned()))
            .collect(),
    }
}

fn with_references(format: SchemaFormat, text: &str, references: &[(&str, &str)]) -> Schema {
    Schema::parse(&source(format, text, references)).unwrap()
}

fn decoded(schema: &Schema, payload: &[u8]) -> Value {
    serde_json::from_str(&schema.decode(payload).unwrap().text).unwrap()
}

#[test]
fn framed_value_has_schema_id() {
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
fn avro_bombs_are_refused() {
    // An array of 2^62 items without a size.
    let nulls = avro(r#"{"type":"array","items":"null"}"#);
    let bomb = b"\xfe\xff\xff\xff\xff\xff\xff\xff\xff\x01";
    assert_eq!(nulls.decode(bomb), Err(DecodeError::LargeResult));
    let empty = avro(r#"{"type":"array","items":{"type":"record","name":"R","fields":[]}}"#);
    assert_eq!(empty.decode(bomb), Err(DecodeError::LargeResult));
    // A list of a million items.
    let list = avro(r#"{"type":"record","name":"L","fields":[{"name":"n","type":["null","L"]}]}"#);
    assert_eq!(list.decode(&vec![2; 1_000_000]), Err(DecodeError::Depth));
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
    assert!(Schema::parse(&source(SchemaFormat::Avro, cart, &[])).is_err());
}

/// Each of these would end the process, or take longer than anyone waits.
#[test]
fn avro_schemas_are_bounded() {
    // Each schema refers to the next one, from deep inside.
    let nested = |name: usize, inner: &str| {
        let (open, close) = (r#"{"type":"array","items":"#.repeat(100), "}".repeat(100));
        format!(
            r#"{{"type":"record","name":"R{name}","fields":[{{"name":"a","type":{open}{inner}{close}}}]}}"#
        )
    };
    let chain: Vec<String> = (0..64)
        .map(|name| nested(name, &format!("\"R{}\"", name + 1)))
        .collect();
    let last = nested(64, "\"int\"");
    let references: Vec<(&str, &str)> = chain[1..]
        .iter()
        .chain([&last])
        .map(|text| ("", text.as_str()))
        .collect();
    let schema = with_references(SchemaFormat::Avro, &chain[0], &references);
    assert_eq!(schema.decode(&[2; 10_000]), Err(DecodeError::Depth));

    // Each record contains the previous one twice, with default values that contain default values.
    let mut fields = vec![r#"{"name":"f0","type":{"type":"record","name":"R0","fields":[]}}"#.to_owned()];
    for name in 1..60 {
        let previous = format!(r#""type":"R{}","default":{{}}"#, name - 1);
        fields.push(format!(
            r#"{{"name":"f{name}","type":{{"type":"record","name":"R{name}","fields":[{{"name":"a",{previous}}},{{"name":"b",{previous}}}]}}}}"#
        ));
    }
    let doubling = avro(&format!(
        r#"{{"type":"record","name":"All","fields":[{}]}}"#,
        fields.join(",")
    ));
    assert_eq!(doubling.decode(b""), Err(DecodeError::LargeResult));

    let deep = "[".repeat(400_000);
    assert!(Schema::parse(&source(SchemaFormat::Avro, &deep, &[])).is_err());
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
fn protobuf_type_is_found_by_path() {
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

/// Encodes a field of this number that contains bytes.
fn field(number: u8, content: &[u8]) -> Vec<u8> {
    let mut encoded = vec![number << 3 | 2];
    let mut length = content.len();
    while length >= 0x80 {
        encoded.push(u8::try_from(length & 0x7f).unwrap() | 0x80);
        length >>= 7;
    }
    encoded.push(u8::try_from(length).unwrap());
    encoded.extend(content);
    encoded
}

/// A message of the first type of its schema.
fn of_first_type(message: &[u8]) -> Vec<u8> {
    [&b"\0"[..], message].concat()
}

/// A `google.protobuf.Any`.
fn any(ty: &str, content: &[u8]) -> Vec<u8> {
    let url = format!("type.googleapis.com/{ty}");
    [field(1, url.as_bytes()), field(2, content)].concat()
}

const ENVELOPE: &str = "syntax = \"proto3\"; package shop; import \"google/protobuf/any.proto\"; import \"google/protobuf/timestamp.proto\";
    message Envelope { google.protobuf.Any content = 1; Envelope next = 2; }
    message Card { string card_number = 1; google.protobuf.Any more = 2; }";

#[test]
fn any_of_known_type_is_decoded() {
    let schema = with_references(SchemaFormat::Protobuf, ENVELOPE, &[]);
    let shown = |content: &[u8]| decoded(&schema, &of_first_type(&field(1, content)))["content"].clone();
    let url = |ty: &str| format!("type.googleapis.com/{ty}");
    let time = any("google.protobuf.Timestamp", b"\x08\x01");
    let card = [field(1, b"4111"), field(2, &time)].concat();
    assert_eq!(
        shown(&any("shop.Card", &card)),
        json!({"@type": url("shop.Card"), "cardNumber": "4111",
            "more": {"@type": url("google.protobuf.Timestamp"), "value": "1970-01-01T00:00:01Z"}})
    );
    assert_eq!(
        shown(&any("google.protobuf.Any", &time)),
        json!({"@type": url("google.protobuf.Any"),
            "value": {"@type": url("google.protobuf.Timestamp"), "value": "1970-01-01T00:00:01Z"}})
    );
    assert_eq!(shown(b""), json!({}));
    // What is masked cannot be found in them.
    for (ty, content) in [("shop.Unknown", &card[..]), ("shop.Card", &b"\xff"[..])] {
        assert_eq!(shown(&any(ty, content)), json!({ "@type": url(ty) }));
    }
}

#[test]
fn deep_messages_are_refused() {
    let schema = with_references(SchemaFormat::Protobuf, ENVELOPE, &[]);
    let mut content = Vec::new();
    for _ in 0..5_000 {
        content = any("google.protobuf.Any", &content);
    }
    let value = of_first_type(&field(1, &content));
    assert_eq!(schema.decode(&value), Err(DecodeError::Depth));
    let mut content = Vec::new();
    for _ in 0..5_000 {
        content = field(1, &any("shop.Envelope", &content));
    }
    assert_eq!(schema.decode(&of_first_type(&content)), Err(DecodeError::Depth));
    // Without Any, it is the reader that stops.
    let mut content = Vec::new();
    for depth in 0..2 * MAX_DEPTH {
        content = field(2, &content);
        let decoded = schema.decode(&of_first_type(&content));
        assert_eq!(decoded.is_ok(), depth < MAX_DEPTH, "{depth}");
    }
}

/// Each of these would end the process, or fill its memory.
#[test]
fn protobuf_schemas_are_bounded() {
    let parse = |text: &str| {
        let text = format!("syntax = \"proto3\"; {text}");
        Schema::parse(&source(SchemaFormat::Protobuf, &text, &[])).map(|schema| schema.size())
    };
    let depth = 100_000;
    for (open, close) in [("a {", "}"), ("a <", ">"), ("a: [", "]")] {
        let value = open.repeat(depth) + &close.repeat(depth);
        for text in [
            format!("option (o) = {{ {value} }}; message M {{}}"),
            format!("message M {{ option (o) = {{ {value} }}; }}"),
            format!("message M {{ int32 i = 1 [(o) = {{ {value} }}]; }}"),
            format!("message M {{ oneof x {{ option (o) = {{ {value} }}; int32 i = 1; }} }}"),
            format!("message M {{}} enum E {{ option (o) = {{ {value} }}; A = 0 [(o) = {{ {value} }}]; }}"),
            format!(
                "message M {{}} service S {{ option (o) = {{ {value} }}; rpc R(M) returns (M) {{ option (o) = {{ {value} }}; }} }}"
            ),
        ] {
            assert!(parse(&text).is_ok(), "{open}");
        }
    }
    let path = format!("message M {{ option (o){} = 1; }}", ".m".repeat(depth));
    assert!(parse(&path).is_ok());
    let options =
        "message M { option deprecated = true; } enum E { option allow_alias = true; A = 0; B = 0; }";
    assert!(parse(options).is_ok());

    let refused = |text: &str, problem: &str| {
        let refused = parse(text).unwrap_err();
        assert!(refused.contains(problem), "{refused}");
    };
    let nested = |count: usize| "message M {".repeat(count) + &"}".repeat(count);
    refused(&nested(depth), "recursion limit");
    refused(&format!("package a{};", ".a".repeat(depth)), "components");
    let long = "a".repeat(100_000);
    let messages: String = (0..1_000)
        .map(|index| format!("message M{index} {{}} "))
        .collect();
    refused(&format!("package {long}; {messages}"), "full names");
    refused(&format!("message {long} {{ {messages} }}"), "full names");
    refused(
        &format!("message {long} {{ enum E {{ {} }} }}", "A = 0; ".repeat(1_000)),
        "full names",
    );
    let fields = |count: usize| {
        (1..=count)
            .map(|index| format!("int32 f{index} = {index}; "))
            .collect::<String>()
    };
    refused(
        &format!("message M {{ oneof o {{ {} }} }}", fields(1_001)),
        "oneof",
    );
    let extended = format!(
        "message M {{ extensions 1 to max; }} extend M {{ {} }}",
        fields(501).replace("int32", "optional int32")
    );
    let extended = source(
        SchemaFormat::Protobuf,
        &format!("syntax = \"proto2\"; {extended}"),
        &[],
    );
    assert!(Schema::parse(&extended).unwrap_err().contains("extensions"));
    assert!(parse(&messages).unwrap() > 100 * 1_000);
}

/// The JSON of all kinds of fields is that of the library.
#[test]
fn messages_follow_the_json_mapping() {
    let all = "syntax = \"proto3\"; package p; import \"google/protobuf/wrappers.proto\"; import \"google/protobuf/struct.proto\";
        import \"google/protobuf/duration.proto\"; import \"google/protobuf/field_mask.proto\"; import \"google/protobuf/empty.proto\";
        enum E { ZERO = 0; ONE = 1; }
        message All { bool a = 1; int32 b = 2; sint64 c = 3; fixed32 d = 4; uint64 e = 5; float f = 6; double g = 7; string h = 8; bytes i = 9;
            E j = 10; repeated E k = 11; map<int32, string> l = 12; map<string, All> m = 13; All n = 14; repeated string o = 15;
            google.protobuf.Int64Value p = 16; google.protobuf.Struct q = 17; google.protobuf.Duration r = 18; google.protobuf.FieldMask s = 19;
            google.protobuf.Empty t = 20; google.protobuf.NullValue u = 21; optional int32 v = 22; repeated float w = 23; google.protobuf.Value x = 24;
            map<bool, double> y = 25; google.protobuf.ListValue z = 26; oneof choice { int32 aa = 27; string bb = 28; } repeated double cc = 29 [json_name = \"C C\"]; }";
    let text = r#"{"a":true,"b":-2,"c":"-3","d":4,"e":"18446744073709551615","f":1.5,"g":1e100,"h":"\u0001ä\"","i":"/w==","j":"ONE","k":["ZERO",7],
        "l":{"-1":"x","2":"y"},"m":{"k":{"b":1}},"n":{"n":{}},"o":["","x"],"p":"9","q":{"s":[1.5,null,{"t":true}]},"r":"1.500s","s":"a,bC","t":{},
        "v":0,"w":["NaN","Infinity","-Infinity",0.1],"x":"text","y":{"true":0.1,"false":2.5},"z":[1.5,"b"],"bb":"","C C":["-Infinity",3.0]}"#;
    let schema = protobuf::Protobuf::parse(&source(SchemaFormat::Protobuf, all, &[])).unwrap();
    let message = schema.file().messages().next().unwrap();
    let message =
        DynamicMessage::deserialize(message, &mut serde_json::Deserializer::from_str(text)).unwrap();
    let payload = [&b"\0"[..], &redeliver_proto::Message::encode_to_vec(&message)].concat();
    let shown = schema.decode(&payload).unwrap().text;
    let shown: Value = serde_json::from_str(&shown).unwrap();
    assert_eq!(shown, serde_json::from_str::<Value>(text).unwrap());
    let of_library = serde_json::to_string(&message).unwrap();
    assert_eq!(shown, serde_json::from_str::<Value>(&of_library).unwrap());
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
fn damaged_value_is_refused_or_json() {
    damaged_values(10_000);
}

#[test]
#[ignore = "long"]
fn many_damaged_values_never_panic() {
    damaged_values(1_000_000);
}

#[test]
fn valid_json_is_unchanged() {
    let schema = with_references(SchemaFormat::Json, "", &[]);
    assert_eq!(schema.decode(b"{"), Err(DecodeError::Mismatch));
    let document = |random: &mut fastrand::Rng| valid_json::value(random).into_bytes();
    check_each("valid_json", FEW, document, |input| {
        assert_eq!(schema.decode(input).unwrap().text.as_bytes(), input);
    });
}
