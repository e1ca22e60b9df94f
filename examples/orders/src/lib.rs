//! Confirms orders: a typed message, a topic for urgent ones, and failures that a later attempt can or cannot cure.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use redeliver_worker::{Attempt, Failure, Outcome};
use serde::{Deserialize, Serialize};

/// Where urgent orders go. The pipeline lists it in `output`.
pub const EXPRESS: &str = "orders-express";

/// An order. `order.schema.json` limits its fields, so a handler never sees a quantity of 0.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Order {
    /// A version 4 UUID.
    pub order_id: String,
    /// Who ordered.
    pub user: String,
    /// An article of the [`Catalogue`].
    pub item: String,
    /// 1 to 10,000.
    pub quantity: u64,
    /// The price of one piece that the user has seen, such as 19.9. `None`: any.
    pub price: Option<f64>,
    /// When the order was placed (RFC 3339, or UTC without an offset).
    pub timestamp: String,
    /// How soon it must be shipped.
    pub priority: Priority,
}

/// How soon an order must be shipped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Priority {
    /// When there is nothing else to do.
    Low,
    /// Within days.
    #[default]
    Normal,
    /// The next day.
    High,
    /// Today.
    Urgent,
}

/// The answer to an order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Confirmation {
    /// The id of the order.
    pub order_id: String,
    /// What the order costs, in cents.
    pub total: u64,
}

/// The articles that can be ordered.
#[derive(Clone, Debug)]
pub struct Catalogue {
    articles: Vec<Article>,
}

#[derive(Clone, Debug)]
struct Article {
    name: &'static str,
    /// In cents.
    price: u32,
    /// Seconds since 1970.
    available_from: u64,
}

impl Catalogue {
    /// Some articles. The lamp is not available before this time, in seconds since 1970.
    #[must_use]
    pub fn with_lamp_from(lamp_from: u64) -> Self {
        let article = |name, price, available_from| Article {
            name,
            price,
            available_from,
        };
        let articles = vec![
            article("book", 1_990, 0),
            article("pen", 250, 0),
            article("lamp", 4_900, lamp_from),
        ];
        Self { articles }
    }

    /// The handler. `now` is the current time.
    ///
    /// # Errors
    /// - `value.json`, permanent: the value is not an order.
    /// - `orders.unknown-item`, permanent: no attempt can succeed.
    /// - `orders.price-changed`, permanent: the user must decide.
    /// - `orders.not-yet-available`, throttled: the order waits until the article is available. Such attempts do not count.
    pub fn confirm(&self, attempt: &Attempt, now: SystemTime) -> Result<Outcome, Failure> {
        let order: Order = attempt.json()?;
        let article = self.articles.iter().find(|article| article.name == order.item);
        let Some(article) = article else {
            return Err(Failure::permanent("orders.unknown-item", "no such article"));
        };
        let price = f64::from(article.price) / 100.0;
        // Half a cent: other languages may write 19.900000000000002.
        if order.price.is_some_and(|seen| (seen - price).abs() > 0.005) {
            let message = format!("the price is {price:.2}");
            return Err(Failure::permanent("orders.price-changed", message));
        }
        let now = now.duration_since(UNIX_EPOCH).unwrap_or_default();
        let available_from = Duration::from_secs(article.available_from);
        if let Some(wait) = available_from.checked_sub(now).filter(|wait| !wait.is_zero()) {
            let message = "the article is not available yet";
            return Err(Failure::throttled(wait, "orders.not-yet-available", message));
        }
        let mut outcome = Outcome::json(&Confirmation {
            order_id: order.order_id,
            total: order.quantity * u64::from(article.price),
        })?;
        if matches!(order.priority, Priority::High | Priority::Urgent) {
            outcome = outcome.to_topic(EXPRESS);
        }
        Ok(outcome)
    }
}

impl Default for Catalogue {
    fn default() -> Self {
        Self::with_lamp_from(0)
    }
}
