//! From YAML text to a tree.

use std::collections::HashMap;
use std::sync::Arc;

use granit_parser::{Event, Parser, ScalarStyle, ScanError, Span, Tag};

use super::problem::ConfigError;
use super::tree::{Node, Origin, Value};

/// Deeper files were not written by people.
const MAX_DEPTH: usize = 32;
/// Aliases multiply; a file that unfolds into more values than this is refused.
const MAX_NODES: usize = 100_000;

/// Reads one YAML document; an empty one is an empty mapping. `name` is how errors call the text.
pub(super) fn parse(text: &str, name: &str) -> Result<Node, ConfigError> {
    let name: Arc<str> = name.into();
    let place = |line| Origin::File(name.clone(), line);
    parse_at(text, &place).map_err(|fault| ConfigError::Syntax {
        place: place(fault.line).to_string(),
        problem: fault.problem,
    })
}

/// Reads the text of an environment variable or a flag, which has no lines.
pub(super) fn parse_inline(text: &str, origin: &Origin) -> Result<Node, String> {
    parse_at(text, &|_| origin.clone()).map_err(|fault| fault.problem)
}

struct Fault {
    line: usize,
    problem: String,
}

impl From<ScanError> for Fault {
    fn from(error: ScanError) -> Self {
        Self {
            line: error.marker().line(),
            problem: format!("is not YAML: {}", error.kind()),
        }
    }
}

/// A collection whose end has not been seen yet.
struct Open {
    node: Node,
    anchor: usize,
    /// The key that waits for its value, in a mapping.
    key: Option<(String, usize)>,
}

fn parse_at(text: &str, place: &dyn Fn(usize) -> Origin) -> Result<Node, Fault> {
    let mut builder = Builder {
        open: Vec::new(),
        anchors: HashMap::new(),
        nodes: 0,
        root: None,
    };
    // A byte order mark is no part of the settings.
    for event in Parser::new_from_str(text.trim_start_matches('\u{feff}')) {
        let (event, span) = event?;
        builder.accept(event, &span, place)?;
    }
    let root = builder.root.unwrap_or_else(|| Node::new(Value::Null, place(1)));
    Ok(match root.value {
        Value::Null => Node::new(Value::Map(Vec::new()), root.origin),
        _ => root,
    })
}

struct Builder {
    open: Vec<Open>,
    anchors: HashMap<usize, Node>,
    nodes: usize,
    root: Option<Node>,
}

impl Builder {
    fn accept(
        &mut self,
        event: Event<'_>,
        span: &Span,
        place: &dyn Fn(usize) -> Origin,
    ) -> Result<(), Fault> {
        let line = span.start.line();
        let fault = |problem: &str| Fault {
            line,
            problem: problem.to_owned(),
        };
        match event {
            Event::DocumentStart(..) if self.root.is_some() => {
                return Err(fault("is more than one YAML document; write one"));
            }
            Event::Scalar(text, style, anchor, tag) => {
                let is_null =
                    style == ScalarStyle::Plain && matches!(&*text, "" | "~" | "null" | "Null" | "NULL");
                let tagged_text = has_tag(tag.as_deref(), "str").map_err(|problem| fault(&problem))?;
                let value = if is_null && !tagged_text {
                    Value::Null
                } else {
                    Value::Scalar(text.into_owned())
                };
                self.finish(Node::new(value, place(line)), anchor, line)?;
            }
            Event::SequenceStart(_, anchor, tag) => {
                has_tag(tag.as_deref(), "seq").map_err(|problem| fault(&problem))?;
                self.begin(Node::new(Value::List(Vec::new()), place(line)), anchor, line)?;
            }
            Event::MappingStart(_, anchor, tag) => {
                has_tag(tag.as_deref(), "map").map_err(|problem| fault(&problem))?;
                self.begin(Node::new(Value::Map(Vec::new()), place(line)), anchor, line)?;
            }
            Event::SequenceEnd | Event::MappingEnd => {
                let Some(closed) = self.open.pop() else {
                    return Err(fault("ends more than it began"));
                };
                self.finish(closed.node, closed.anchor, line)?;
            }
            Event::Alias(anchor) => {
                let node = self.anchors.get(&anchor).cloned();
                let node = node.ok_or_else(|| fault("has an alias that contains itself"))?;
                self.nodes += count(&node);
                self.finish(node, 0, line)?;
            }
            _ => {}
        }
        Ok(())
    }

    fn begin(&mut self, node: Node, anchor: usize, line: usize) -> Result<(), Fault> {
        if self.open.len() >= MAX_DEPTH {
            let problem = format!("is nested more than {MAX_DEPTH} levels deep");
            return Err(Fault { line, problem });
        }
        if self
            .open
            .last()
            .is_some_and(|open| matches!(open.node.value, Value::Map(_)) && open.key.is_none())
        {
            return Err(Fault {
                line,
                problem: "has a key that is not a text".to_owned(),
            });
        }
        self.open.push(Open {
            node,
            anchor,
            key: None,
        });
        Ok(())
    }

    fn finish(&mut self, node: Node, anchor: usize, line: usize) -> Result<(), Fault> {
        self.nodes += 1;
        if self.nodes > MAX_NODES {
            return Err(Fault {
                line,
                problem: format!("has more than {MAX_NODES} values"),
            });
        }
        if anchor != 0 {
            self.anchors.insert(anchor, node.clone());
        }
        let Some(open) = self.open.last_mut() else {
            self.root = Some(node);
            return Ok(());
        };
        match (&mut open.node.value, open.key.take()) {
            (Value::List(items), _) => items.push(node),
            (Value::Map(entries), Some((key, _))) => entries.push((key, node)),
            (Value::Map(entries), None) => {
                let key = match node.value {
                    Value::Scalar(text) => text,
                    Value::Null => "null".to_owned(),
                    _ => {
                        return Err(Fault {
                            line,
                            problem: "has a key that is not a text".to_owned(),
                        });
                    }
                };
                if entries.iter().any(|(name, _)| *name == key) {
                    return Err(Fault {
                        line,
                        problem: format!("has the key `{key}` twice in the same place"),
                    });
                }
                open.key = Some((key, line));
            }
            _ => {}
        }
        Ok(())
    }
}

/// Whether a value bears the standard tag of that name; other tags are refused.
fn has_tag(tag: Option<&Tag>, allowed: &str) -> Result<bool, String> {
    match tag {
        None => Ok(false),
        Some(tag) if tag.core_suffix() == Some(allowed) => Ok(true),
        Some(tag) => Err(format!(
            "has the tag `{}`; tags are not needed here",
            tag.original()
        )),
    }
}

fn count(node: &Node) -> usize {
    match &node.value {
        Value::List(items) => 1 + items.iter().map(count).sum::<usize>(),
        Value::Map(entries) => 1 + entries.iter().map(|(_, node)| count(node)).sum::<usize>(),
        _ => 1,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn problem(text: &str) -> String {
        parse(text, "f.yaml").unwrap_err().to_string()
    }

    #[test]
    fn scalars_keep_their_text_and_their_line() {
        let tree = parse("a: 1.10\nb:\n  c: \"null\"\n  d: ~\n", "f.yaml").unwrap();
        let text = |path: &[&str]| match &tree.at(&super::super::tree::Path::of(path)).unwrap().value {
            Value::Scalar(text) => Some(text.clone()),
            _ => None,
        };
        assert_eq!(text(&["a"]).as_deref(), Some("1.10"));
        assert_eq!(text(&["b", "c"]).as_deref(), Some("null"));
        assert_eq!(text(&["b", "d"]), None);
        assert_eq!(
            tree.get("b").unwrap().get("c").unwrap().origin.to_string(),
            "f.yaml line 3"
        );
    }

    #[test]
    fn an_empty_file_is_an_empty_mapping_and_aliases_are_copies() {
        for empty in ["", "# only a comment\n", "---\n", "\u{feff}"] {
            assert!(matches!(parse(empty, "f").unwrap().value, Value::Map(entries) if entries.is_empty()));
        }
        let tree = parse("a: &x [1, 2]\nb: *x\n", "f").unwrap();
        assert!(matches!(&tree.get("b").unwrap().value, Value::List(items) if items.len() == 2));
    }

    #[test]
    fn what_is_not_plain_yaml_is_refused_with_its_line() {
        assert!(
            problem("a: [1, 2\nb: 3\n").starts_with("f.yaml line "),
            "{}",
            problem("a: [1, 2\nb: 3\n")
        );
        assert_eq!(
            problem("a: 1\nb: 2\na: 3\n"),
            "f.yaml line 3: has the key `a` twice in the same place"
        );
        assert_eq!(
            problem("a: !secret x\n"),
            "f.yaml line 1: has the tag `!secret`; tags are not needed here"
        );
        assert_eq!(
            problem("a: 1\n---\nb: 2\n"),
            "f.yaml line 2: is more than one YAML document; write one"
        );
        assert_eq!(
            problem("? [1]\n: 2\n"),
            "f.yaml line 1: has a key that is not a text"
        );
    }

    #[test]
    fn aliases_cannot_grow_without_end() {
        let mut text = "a0: &a0 [1,1,1,1,1,1,1,1,1,1]\n".to_owned();
        for n in 1..9 {
            let before = format!("*a{},", n - 1).repeat(10);
            text += &format!("a{n}: &a{n} [{before}]\n");
        }
        assert!(problem(&text).contains("more than 100000 values"));
        assert!(problem(&("[".repeat(40) + &"]".repeat(40))).contains("levels deep"));
        // Far too deep is refused by the scanner already.
        assert!(parse(&"[".repeat(100_000), "f").is_err());
    }

    proptest! {
        #[test]
        fn arbitrary_text_never_panics(text in "[-a-c:\\[\\]{}&*!|>'\"%@`#?,~ \n\t0-9]{0,60}") {
            let _ = parse(&text, "f");
        }
    }
}
