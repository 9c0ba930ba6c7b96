//! Parquet files whose columns have the names of a line's fields.

use super::{FIELDS, Line, Prompt, prompt};
use crate::{Error, Result};
use parquet::file::reader::{FileReader, SerializedFileReader};
use serde_json::Value;
use std::{fs::File, path::Path};

/// The rows of a Parquet file, each an object of its columns.
///
/// # Errors
/// A file that cannot be read or is none.
pub fn parquet_rows(path: &Path) -> Result<Vec<Value>> {
    let file = File::open(path).map_err(Error::io(path))?;
    let invalid =
        |e: parquet::errors::ParquetError| Error::invalid(path, "file", e.to_string(), "a Parquet file");
    let reader = SerializedFileReader::new(file).map_err(invalid)?;
    let rows = reader.get_row_iter(None).map_err(invalid)?;
    rows.map(|row| Ok(row.map_err(invalid)?.to_json_value())).collect()
}

pub(super) fn read_parquet(path: &Path) -> Result<Vec<Prompt>> {
    let read = |(i, row): (usize, Value)| {
        let at = format!("row {}", i + 1);
        let line: Line =
            serde_json::from_value(row).map_err(|e| Error::invalid(path, &at, e.to_string(), FIELDS))?;
        prompt(line, i + 1, path, at)
    };
    parquet_rows(path)?.into_iter().enumerate().map(read).collect()
}

#[cfg(test)]
mod tests {
    use super::super::read_prompts;
    use crate::text::Message;
    use parquet::{
        data_type::{ByteArray, ByteArrayType},
        file::{properties::WriterProperties, writer::SerializedFileWriter},
        schema::parser::parse_message_type,
    };
    use serde_json::json;
    use std::{fs::File, path::Path, sync::Arc};

    /// Writes a column after the other: values with their levels.
    fn write(path: &Path, schema: &str, columns: &[(&[&str], Option<(&[i16], &[i16])>)]) {
        let schema = Arc::new(parse_message_type(schema).unwrap());
        let properties = Arc::new(WriterProperties::builder().build());
        let mut file = SerializedFileWriter::new(File::create(path).unwrap(), schema, properties).unwrap();
        let mut group = file.next_row_group().unwrap();
        for (values, levels) in columns {
            let mut column = group.next_column().unwrap().unwrap();
            let values: Vec<ByteArray> = values.iter().map(|v| ByteArray::from(*v)).collect();
            let (definition, repetition) = levels.unzip();
            column.typed::<ByteArrayType>().write_batch(&values, definition, repetition).unwrap();
            column.close().unwrap();
        }
        group.close().unwrap();
        file.close().unwrap();
    }

    #[test]
    fn prompts_and_conversations_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("p.parquet");
        let schema = "message m { required binary id (UTF8); required binary prompt (UTF8); }";
        write(&path, schema, &[(&["a", "b"], None), (&["x", "y"], None)]);
        let prompts = read_prompts(&path).unwrap();
        let found: Vec<_> = prompts.iter().map(|p| (p.id.as_str(), p.messages[0].content.as_str())).collect();
        assert_eq!(found, [("a", "x"), ("b", "y")]);

        let schema =
            "message m { required group messages (LIST) { repeated group list { required group element {
            required binary role (UTF8); required binary content (UTF8); } } } }";
        let levels: Option<(&[i16], &[i16])> = Some((&[1, 1, 1], &[0, 1, 0]));
        write(&path, schema, &[(&["user", "assistant", "user"], levels), (&["q", "r", "s"], levels)]);
        let prompts = read_prompts(&path).unwrap();
        assert_eq!(prompts[0].messages, [Message::user("q"), Message::assistant("r")]);
        assert_eq!((prompts[1].id.as_str(), &prompts[1].messages[..]), ("2", &[Message::user("s")][..]));

        // As public sets have it, a value may be absent.
        let schema = "message rows { required binary question (UTF8); optional binary input (UTF8); }";
        let present: Option<(&[i16], &[i16])> = Some((&[0, 1], &[0, 0]));
        write(&path, schema, &[(&["Why?", "How?"], None), (&["x"], present)]);
        let expected =
            [json!({"question": "Why?", "input": null}), json!({"question": "How?", "input": "x"})];
        assert_eq!(super::parquet_rows(&path).unwrap(), expected);

        let schema = "message m { required binary text (UTF8); }";
        write(&path, schema, &[(&["x"], None)]);
        let error = read_prompts(&path).unwrap_err().to_string();
        assert!(error.contains("row 1: found none of these fields"), "{error}");
        std::fs::write(&path, "no").unwrap();
        assert!(read_prompts(&path).unwrap_err().to_string().contains("a Parquet file"));
    }
}
