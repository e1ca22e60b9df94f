//! Random valid JSON, for readers of what others have written: with all that JSON is and some parsers are not prepared for.

use fastrand::Rng;

/// Values that a double, UTF-8 or the private names of `serde_json` get wrong.
const SPECIAL: &[&str] = &[
    "1e400",
    "-1E+999999999999999999999",
    "1e-400",
    "18446744073709551616",
    "18446744073709551617",
    "-9223372036854775809",
    "0.10000000000000001",
    "-0.0",
    "1.50",
    r#""\ud800""#,
    r#""\udc00\ud800x""#,
    r#""\ud83d\ude00\u0000""#,
    "\"\u{10ffff}\u{7f}\"",
    r#"{"\udfff":1}"#,
    r#"{"$serde_json::private::RawValue":"{\"id\":\"forged\"}"}"#,
    r#"{"$serde_json::private::Number":"1"}"#,
    r#"{"a":1,"a":2}"#,
    "null",
    "true",
    "false",
    "0",
    "\"\"",
    "[]",
    "{}",
];
/// Names of other fields.
const NAMES: &[&str] = &[
    r#""""#,
    r#""x""#,
    r#""\ud800""#,
    r#""$serde_json::private::RawValue""#,
    r#""$serde_json::private::Number""#,
    r#""\u00e9/~""#,
    r#""é""#,
];
/// The depth of the deepest values.
const DEEP: usize = 2_000;

/// Any value.
pub fn value(random: &mut Rng) -> String {
    nested(random, 3)
}

/// An object with these fields, whose names are not JSON and whose values are, and with others. White space, the order and the spelling of names are
/// random.
pub fn object(random: &mut Rng, fields: &[(&str, &str)]) -> String {
    let mut members: Vec<(String, String)> = (0..random.usize(..4))
        .map(|_| (one_of(random, NAMES).to_owned(), value(random)))
        .collect();
    members.extend(
        fields
            .iter()
            .map(|(name, value)| (spelled(random, name), (*value).to_owned())),
    );
    random.shuffle(&mut members);
    let members: Vec<String> = members
        .into_iter()
        .map(|(name, value)| {
            let [a, b, c, d] = [(); 4].map(|()| space(random));
            format!("{a}{name}{b}:{c}{value}{d}")
        })
        .collect();
    let (before, after) = (space(random), space(random));
    format!("{before}{{{}}}{after}", members.join(","))
}

fn nested(random: &mut Rng, depth: usize) -> String {
    match random.u8(..if depth == 0 { 6 } else { 10 }) {
        0..4 => one_of(random, SPECIAL).to_owned(),
        4 => random.i64(..).to_string(),
        5 if random.u8(..20) == 0 => {
            let levels = random.usize(..DEEP);
            format!("{}{}", "[".repeat(levels + 1), "]".repeat(levels + 1))
        }
        5 => format!("{}.{}", "9".repeat(random.usize(1..400)), random.u32(..)),
        6 | 7 => {
            let items: Vec<String> = (0..random.usize(..4))
                .map(|_| nested(random, depth - 1))
                .collect();
            format!("[{}]", items.join(&format!("{},", space(random))))
        }
        _ => {
            let fields = (0..random.usize(..4)).map(|_| {
                let name = one_of(random, NAMES);
                format!("{name}:{}{}", space(random), nested(random, depth - 1))
            });
            format!("{{{}}}", fields.collect::<Vec<_>>().join(","))
        }
    }
}

/// A name in quotation marks, in which a letter may be escaped.
fn spelled(random: &mut Rng, name: &str) -> String {
    let escaped = random.usize(..2 * name.len());
    let letters = name.char_indices().map(|(index, letter)| match index == escaped {
        true => format!("\\u{:04x}", u32::from(letter)),
        false => letter.to_string(),
    });
    format!("\"{}\"", letters.collect::<String>())
}

fn space(random: &mut Rng) -> &'static str {
    one_of(random, &["", "", "", " ", "\n", "\t\r\n "])
}

fn one_of(random: &mut Rng, all: &[&'static str]) -> &'static str {
    all[random.usize(..all.len())]
}
