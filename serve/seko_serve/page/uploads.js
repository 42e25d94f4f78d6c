// Files that a session begins with, as data URLs.
const LONGEST_SIDE = 1280;
const megabytes = (bytes) => (bytes / 2 ** 20).toFixed(1);

/** Read any picture that the browser knows, turned as its camera says, small enough to upload. */
export async function pictureUrl(file) {
  const picture = await createImageBitmap(file).catch(() => { throw new Error(`${file.name} cannot be read as a picture`); });
  const scale = Math.min(1, LONGEST_SIDE / Math.max(picture.width, picture.height));
  const canvas = new OffscreenCanvas(Math.max(1, Math.round(picture.width * scale)), Math.max(1, Math.round(picture.height * scale)));
  canvas.getContext("2d").drawImage(picture, 0, 0, canvas.width, canvas.height);
  return dataUrl(await canvas.convertToBlob({ type: "image/png" }));
}

/** Read a file as a data URL; an error says so if it has more bytes than the server takes. */
export function dataUrl(blob, most = Infinity) {
  return new Promise((resolve, reject) => {
    if (blob.size > most) {
      reject(new Error(`${blob.name} has ${megabytes(blob.size)} MB, and at most ${megabytes(most)} MB are taken`));
      return;
    }
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error("The file cannot be read"));
    reader.readAsDataURL(blob);
  });
}
