//! Rows of a table in memory, column by column.

use std::sync::Arc;

use delta_kernel::arrow::array::{
    ArrayRef, BooleanBuilder, Int32Builder, Int64Builder, RecordBatch, StringBuilder,
    TimestampMicrosecondBuilder,
};
use delta_kernel::arrow::datatypes::{DataType, Field, Schema as ArrowSchema, SchemaRef, TimeUnit};
use delta_kernel::arrow::error::ArrowError;
use redeliver_core::Timestamp;
use redeliver_proto::convert::time_of_record;

use crate::schema::{Kind, Schema, UNFIT};

/// The longest text of a cell, in bytes. Longer ones do not fit.
pub(crate) const MAX_TEXT: usize = 64 << 10;
/// The name of the time zone in which all times are, as Delta requires it.
const UTC: &str = "UTC";

/// The cells of a column.
enum Cells {
    Text(StringBuilder),
    Int(Int32Builder),
    Long(Int64Builder),
    Time(TimestampMicrosecondBuilder),
    Flag(BooleanBuilder),
}

/// Rows of a table.
pub(crate) struct Batch {
    schema: &'static Schema,
    cells: Vec<Cells>,
    rows: usize,
    bytes: usize,
}

/// A row that is being added. Its cells follow in the order of the columns.
pub(crate) struct Row<'b> {
    batch: &'b mut Batch,
    next: usize,
    unfit: String,
}

impl Batch {
    /// Without rows.
    pub(crate) fn new(schema: &'static Schema) -> Self {
        let cells = schema.columns.iter().map(|column| match column.kind {
            Kind::Text => Cells::Text(StringBuilder::new()),
            Kind::Int => Cells::Int(Int32Builder::new()),
            Kind::Long => Cells::Long(Int64Builder::new()),
            Kind::Time => Cells::Time(TimestampMicrosecondBuilder::new().with_timezone(UTC)),
            Kind::Flag => Cells::Flag(BooleanBuilder::new()),
        });
        Self {
            schema,
            cells: cells.collect(),
            rows: 0,
            bytes: 0,
        }
    }

    /// The number of rows.
    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    /// The size of the rows in memory, about.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Begins a row, which [`Row::end`] ends.
    pub(crate) fn row(&mut self) -> Row<'_> {
        Row {
            batch: self,
            next: 0,
            unfit: String::new(),
        }
    }

    /// Takes the rows; the batch is empty then.
    ///
    /// # Errors
    /// Never: all columns have the same length, and the types of the schema.
    pub(crate) fn take(&mut self) -> Result<RecordBatch, ArrowError> {
        (self.rows, self.bytes) = (0, 0);
        let columns = self.cells.iter_mut().map(|cells| -> ArrayRef {
            match cells {
                Cells::Text(cells) => Arc::new(cells.finish()),
                Cells::Int(cells) => Arc::new(cells.finish()),
                Cells::Long(cells) => Arc::new(cells.finish()),
                Cells::Time(cells) => Arc::new(cells.finish()),
                Cells::Flag(cells) => Arc::new(cells.finish()),
            }
        });
        RecordBatch::try_new(arrow_schema(self.schema), columns.collect())
    }

    /// Drops the rows.
    pub(crate) fn clear(&mut self) {
        *self = Self::new(self.schema);
    }
}

fn arrow_schema(schema: &Schema) -> SchemaRef {
    let fields = schema.columns.iter().map(|column| {
        let kind = match column.kind {
            Kind::Text => DataType::Utf8,
            Kind::Int => DataType::Int32,
            Kind::Long => DataType::Int64,
            Kind::Time => DataType::Timestamp(TimeUnit::Microsecond, Some(UTC.into())),
            Kind::Flag => DataType::Boolean,
        };
        Field::new(column.name, kind, true)
    });
    Arc::new(ArrowSchema::new(fields.collect::<Vec<_>>()))
}

impl Row<'_> {
    /// A text; `None` is null. One that is too long does not fit.
    pub(crate) fn text(&mut self, name: &'static str, text: Option<&str>) {
        let fitting = text.filter(|text| text.len() <= MAX_TEXT);
        if fitting.is_none() && text.is_some() {
            self.does_not_fit(name, "too long");
        }
        self.batch.bytes += 4 + fitting.map_or(0, str::len);
        match self.cell(name) {
            Cells::Text(cells) => cells.append_option(fitting),
            _ => unreachable!("{name} is a text"),
        }
    }

    /// A text that may be no UTF-8, and does not fit then.
    pub(crate) fn bytes(&mut self, name: &'static str, bytes: Option<&[u8]>) {
        let text = bytes.map(std::str::from_utf8);
        if let Some(Err(_)) = text {
            self.does_not_fit(name, "not UTF-8");
        }
        self.text(name, text.and_then(Result::ok));
    }

    /// A number.
    pub(crate) fn int(&mut self, name: &'static str, number: Option<i32>) {
        self.batch.bytes += 4;
        match self.cell(name) {
            Cells::Int(cells) => cells.append_option(number),
            _ => unreachable!("{name} is an int"),
        }
    }

    /// A number. One that is too large does not fit.
    pub(crate) fn long(&mut self, name: &'static str, number: Option<impl TryInto<i64>>) {
        let number = number.map(TryInto::try_into);
        if let Some(Err(_)) = number {
            self.does_not_fit(name, "out of range");
        }
        self.batch.bytes += 8;
        match self.cell(name) {
            Cells::Long(cells) => cells.append_option(number.and_then(Result::ok)),
            _ => unreachable!("{name} is a long"),
        }
    }

    /// A time. One whose year is not from 1 to 9999 does not fit: some engines fail to show it.
    pub(crate) fn time(&mut self, name: &'static str, time: Option<Timestamp>) {
        let fitting = time.filter(|time| time_of_record(*time).is_some());
        if fitting.is_none() && time.is_some() {
            self.does_not_fit(name, "out of range");
        }
        self.batch.bytes += 8;
        match self.cell(name) {
            Cells::Time(cells) => cells.append_option(fitting.map(|time| time.as_millis() * 1_000)),
            _ => unreachable!("{name} is a time"),
        }
    }

    /// True or false.
    pub(crate) fn flag(&mut self, name: &'static str, flag: Option<bool>) {
        self.batch.bytes += 1;
        match self.cell(name) {
            Cells::Flag(cells) => cells.append_option(flag),
            _ => unreachable!("{name} is a flag"),
        }
    }

    /// Nulls in the columns before this one.
    pub(crate) fn nulls_before(&mut self, name: &'static str) {
        while self.batch.schema.columns[self.next].name != name {
            let column = self.batch.schema.columns[self.next];
            match column.kind {
                Kind::Text => self.text(column.name, None),
                Kind::Int => self.int(column.name, None),
                Kind::Long => self.long(column.name, None::<i64>),
                Kind::Time => self.time(column.name, None),
                Kind::Flag => self.flag(column.name, None),
            }
        }
    }

    /// Says why the value of a column does not fit, which is null then.
    pub(crate) fn does_not_fit(&mut self, name: &str, reason: &str) {
        let separator = if self.unfit.is_empty() { "" } else { "; " };
        self.unfit.extend([separator, name, ": ", reason]);
    }

    /// Ends the row. Columns that are left are null.
    pub(crate) fn end(mut self) {
        self.nulls_before(UNFIT);
        let unfit = std::mem::take(&mut self.unfit);
        self.text(UNFIT, Some(&*unfit).filter(|unfit| !unfit.is_empty()));
        self.batch.rows += 1;
    }

    fn cell(&mut self, name: &'static str) -> &mut Cells {
        debug_assert_eq!(self.batch.schema.columns[self.next].name, name);
        self.next += 1;
        &mut self.batch.cells[self.next - 1]
    }
}

#[cfg(test)]
mod tests {
    use delta_kernel::arrow::array::{Array as _, AsArray as _};
    use delta_kernel::arrow::datatypes::{Int64Type, TimestampMicrosecondType};

    use super::*;
    use crate::schema::GAPS;

    #[test]
    fn unfit_values_are_null() {
        let mut batch = Batch::new(&GAPS);
        let mut row = batch.row();
        row.text("kafka_topic", Some(&"x".repeat(MAX_TEXT + 1)));
        row.bytes("kafka_topic_id", Some(b"\xff"));
        row.int("kafka_partition", Some(3));
        row.long("kafka_offset", Some(u64::MAX));
        row.time("kafka_timestamp", Some(Timestamp::from_millis(i64::MAX)));
        row.end();
        let mut row = batch.row();
        row.nulls_before("kafka_timestamp");
        row.time("kafka_timestamp", Some(Timestamp::from_millis(-1)));
        row.end();
        assert_eq!(batch.rows(), 2);
        let rows = batch.take().unwrap();
        let unfit = rows.column_by_name(UNFIT).unwrap().as_string::<i32>();
        assert_eq!(
            unfit.iter().collect::<Vec<_>>(),
            [
                Some(
                    "kafka_topic: too long; kafka_topic_id: not UTF-8; kafka_offset: out of range; kafka_timestamp: out of range"
                ),
                None
            ]
        );
        let times = rows.column(4).as_primitive::<TimestampMicrosecondType>();
        assert_eq!(times.iter().collect::<Vec<_>>(), [None, Some(-1_000)]);
        let offsets = rows.column(3).as_primitive::<Int64Type>();
        assert_eq!(offsets.null_count(), 2);
        assert_eq!((batch.rows(), batch.bytes()), (0, 0));
    }
}
