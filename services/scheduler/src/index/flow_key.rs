//! The text that identifies a flow in an index: priority, topic and application, such as `1:sms-jobs:sms`.
//!
//! A name of a Kafka topic contains no colon. The name of an application can contain anything, so it comes last.

use crate::job::{Flow, Priority};

/// The text for a flow.
pub(super) fn encode(flow: &Flow) -> String {
    let priority = match flow.priority {
        Priority::High => '0',
        Priority::Normal => '1',
        Priority::Low => '2',
    };
    format!("{priority}:{}:{}", flow.topic, flow.app)
}

/// The flow of a text; `None` if no flow has this text.
pub(super) fn decode(text: &str) -> Option<Flow> {
    let (priority, rest) = text.split_once(':')?;
    let (topic, app) = rest.split_once(':')?;
    let priority = match priority {
        "0" => Priority::High,
        "1" => Priority::Normal,
        "2" => Priority::Low,
        _ => return None,
    };
    Some(Flow {
        app: app.into(),
        topic: topic.into(),
        priority,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flow_survives_encoding() {
        for priority in [Priority::High, Priority::Normal, Priority::Low] {
            for (topic, app) in [
                ("sms-jobs", "sms"),
                ("", ""),
                ("a.b_c", "a:b:"),
                ("t", ":\n\0\u{e9}"),
            ] {
                let flow = Flow {
                    app: app.into(),
                    topic: topic.into(),
                    priority,
                };
                assert_eq!(decode(&encode(&flow)), Some(flow));
            }
        }
    }

    #[test]
    fn other_texts_are_no_flows() {
        for text in ["", "1", "1:topic", "3:topic:app", "01:topic:app", ":topic:app"] {
            assert_eq!(decode(text), None, "{text}");
        }
    }
}
