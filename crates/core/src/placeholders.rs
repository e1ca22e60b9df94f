//! What stands in the template of a message for what differs between messages of the same cause.

/// `scheme://…`.
pub const URL: &str = "<url>";
/// Text in quotation marks.
pub const QUOTED: &str = "<quoted>";
/// A date, a time, or both.
pub const TIME: &str = "<time>";
/// An IP address, or the name of a machine.
pub const HOST: &str = "<host>";
/// A UUID, or another word of letters and digits.
pub const ID: &str = "<id>";
/// Hexadecimal digits.
pub const HEX: &str = "<hex>";
/// Decimal digits.
pub const NUMBER: &str = "<number>";

/// All of them.
pub const ALL: [&str; 7] = [URL, QUOTED, TIME, HOST, ID, HEX, NUMBER];
