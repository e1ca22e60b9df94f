//! serde for types that are written as text.

/// Implements serde for types by their `Display` and `FromStr`. White space around the text does not count.
#[macro_export]
macro_rules! serde_as_text {
    ($($Type:ty),+) => {$(
        impl ::serde::Serialize for $Type {
            fn serialize<S: ::serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> ::serde::Deserialize<'de> for $Type {
            fn deserialize<D: ::serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = <String as ::serde::Deserialize>::deserialize(deserializer)?;
                text.trim().parse().map_err(<D::Error as ::serde::de::Error>::custom)
            }
        }
    )+};
}
