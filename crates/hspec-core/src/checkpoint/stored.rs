//! A tensor's bytes as a file holds them, for conversions that must not change a bit.

use burn::tensor::TensorData;
use bytemuck::{AnyBitPattern, NoUninit, pod_collect_to_vec};
use half::{bf16, f16};
use safetensors::Dtype;
use std::borrow::Cow;

/// The types of elements that are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Element {
    F64,
    F32,
    F16,
    Bf16,
    I64,
    I32,
    U8,
    Bool,
}

impl Element {
    const ALL: [Self; 8] =
        [Self::F64, Self::F32, Self::F16, Self::Bf16, Self::I64, Self::I32, Self::U8, Self::Bool];

    pub(super) fn of(dtype: Dtype) -> Option<Self> {
        Self::ALL.into_iter().find(|element| element.dtype() == dtype)
    }

    pub(super) fn dtype(self) -> Dtype {
        match self {
            Self::F64 => Dtype::F64,
            Self::F32 => Dtype::F32,
            Self::F16 => Dtype::F16,
            Self::Bf16 => Dtype::BF16,
            Self::I64 => Dtype::I64,
            Self::I32 => Dtype::I32,
            Self::U8 => Dtype::U8,
            Self::Bool => Dtype::BOOL,
        }
    }

    /// The file format's name of it.
    pub(crate) fn name(self) -> String {
        self.dtype().to_string()
    }

    pub(crate) fn is_float(self) -> bool {
        matches!(self, Self::F64 | Self::F32 | Self::F16 | Self::Bf16)
    }
}

/// A tensor as a file stores it.
#[derive(Debug, Clone)]
pub(crate) struct Stored<'a> {
    pub element: Element,
    /// The slowest dimension first.
    pub shape: Vec<usize>,
    /// Little-endian, row-major.
    pub bytes: Cow<'a, [u8]>,
}

impl Stored<'_> {
    /// Its values: floats of every type as f32, integers as i64, truth values as i64 0 and 1.
    pub(crate) fn decode(&self) -> TensorData {
        let (bytes, shape) = (&*self.bytes, self.shape.clone());
        match self.element {
            Element::F32 => TensorData::new(collect::<f32>(bytes), shape),
            Element::F64 => TensorData::new(convert(bytes, |x: f64| x as f32), shape),
            Element::F16 => TensorData::new(convert(bytes, f16::to_f32), shape),
            Element::Bf16 => TensorData::new(convert(bytes, bf16::to_f32), shape),
            Element::I64 => TensorData::new(collect::<i64>(bytes), shape),
            Element::I32 => TensorData::new(convert(bytes, |x: i32| i64::from(x)), shape),
            Element::U8 => TensorData::new(convert(bytes, |x: u8| i64::from(x)), shape),
            Element::Bool => TensorData::new(convert(bytes, |x: u8| i64::from(x != 0)), shape),
        }
    }

    /// Some of its rows, which must be there.
    pub(crate) fn rows(&self, rows: impl ExactSizeIterator<Item = usize>) -> Stored<'static> {
        let mut shape = self.shape.clone();
        let width = self.bytes.len() / shape[0];
        shape[0] = rows.len();
        let mut bytes = Vec::with_capacity(rows.len() * width);
        for row in rows {
            bytes.extend_from_slice(&self.bytes[row * width..][..width]);
        }
        Stored { element: self.element, shape, bytes: Cow::Owned(bytes) }
    }

    /// The same floats in another type, each rounded to nearest where it has fewer bits.
    pub(crate) fn cast(self, to: Element) -> Self {
        if self.element == to || !self.element.is_float() || !to.is_float() {
            return self;
        }
        let values = self.decode();
        let values = values.iter::<f32>();
        let bytes = match to {
            Element::F64 => values.flat_map(|x| f64::from(x).to_le_bytes()).collect(),
            Element::F16 => values.flat_map(|x| f16::from_f32(x).to_le_bytes()).collect(),
            Element::Bf16 => values.flat_map(|x| bf16::from_f32(x).to_le_bytes()).collect(),
            _ => values.flat_map(f32::to_le_bytes).collect(),
        };
        Stored { element: to, shape: self.shape, bytes: Cow::Owned(bytes) }
    }
}

/// Elements of a byte range of any alignment. The format is little-endian, and so is every machine that
/// Burn's backends run on.
fn collect<T: AnyBitPattern + NoUninit>(bytes: &[u8]) -> Vec<T> {
    pod_collect_to_vec(bytes)
}

fn convert<T: AnyBitPattern, U>(bytes: &[u8], to: impl Fn(T) -> U) -> Vec<U> {
    bytes.chunks_exact(size_of::<T>()).map(|b| to(bytemuck::pod_read_unaligned(b))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn floats(values: &[f32]) -> Stored<'static> {
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        Stored { element: Element::F32, shape: vec![values.len() / 2, 2], bytes: Cow::Owned(bytes) }
    }

    #[test]
    fn rows_keep_their_bytes() {
        let some = floats(&[1.0, 2.0, 3.0, f32::NAN, 5.0, 6.0]).rows([2, 0].into_iter());
        assert_eq!(some.shape, [2, 2]);
        assert_eq!(some.decode().to_vec::<f32>().unwrap(), [5.0, 6.0, 1.0, 2.0]);
    }

    #[test]
    fn casts_round_to_nearest_and_widening_loses_nothing() {
        let narrow = floats(&[1.0, 1.003_906_3, -3.1, 65504.0]).cast(Element::Bf16);
        assert_eq!((narrow.element, narrow.bytes.len()), (Element::Bf16, 8));
        assert_eq!(narrow.decode().to_vec::<f32>().unwrap(), [1.0, 1.0, -3.09375, 65536.0]);
        for element in [Element::F32, Element::F64] {
            let wide = narrow.clone().cast(element);
            assert_eq!(wide.cast(Element::Bf16).bytes, narrow.bytes);
        }
        let half = floats(&[1.5, -0.25]).cast(Element::F16);
        assert_eq!(&*half.bytes, [0x00, 0x3e, 0x00, 0xb4]);
    }

    #[test]
    fn types_have_the_names_of_the_file_format() {
        let names = Element::ALL.map(Element::name);
        assert_eq!(names, ["F64", "F32", "F16", "BF16", "I64", "I32", "U8", "BOOL"]);
        assert_eq!(Element::of(Dtype::F8_E4M3), None);
    }
}
