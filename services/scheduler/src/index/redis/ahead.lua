-- KEYS[1] meta  [2] due  [3] ended  [4] buckets
-- ARGV[1] prefix of other keys  [2] until, ms  [3] limit of rows  [4] limit of bytes
--     [5] due time of the row after which to continue, or ''  [6] its id
-- Returns the checkpoint and, if there is one, whether the rows are complete, then id, due time and record of each row.
local found = mark()
if not found[1] then
  return found
end

-- Whether a is greater than b, byte by byte. Lua's comparison of strings depends on the locale of the server.
local function is_behind(a, b)
  for i = 1, 16 do
    local x, y = string.byte(a, i), string.byte(b, i)
    if x ~= y then
      return x > y
    end
  end
  return false
end

local first = 0
local stop = redis.call('ZCOUNT', KEYS[2], '-inf', ARGV[2])
if ARGV[5] ~= '' then
  -- The row after which to continue may be gone. Rows with equal due times are ordered by id, and there can be many of them,
  -- so a binary search finds the position.
  first = redis.call('ZCOUNT', KEYS[2], '-inf', '(' .. ARGV[5])
  local last = redis.call('ZCOUNT', KEYS[2], '-inf', ARGV[5])
  while first < last do
    local middle = math.floor((first + last) / 2)
    if is_behind(redis.call('ZRANGE', KEYS[2], middle, middle)[1], ARGV[6]) then
      last = middle
    else
      first = middle + 1
    end
  end
end

-- The records of these ids and due times, in order; nil if one is missing. Neighbouring jobs often share a bucket, so each
-- bucket is read once.
local function records_of(ids)
  local buckets = {}
  for i = 1, #ids, 2 do
    local a, b, c, d, e, f, g = string.byte(ids[i], 9, 15)
    local high = ((((a % 128 * 256 + b) * 256 + c) * 256 + d) * 256 + e) * 256 + f
    local name = high * 64 + math.floor(g / 4)
    local bucket = buckets[name]
    if not bucket then
      bucket = {ids = {}, places = {}}
      buckets[name] = bucket
    end
    bucket.ids[#bucket.ids + 1] = ids[i]
    bucket.places[#bucket.places + 1] = (i + 1) / 2
  end
  local records = {}
  for name, bucket in pairs(buckets) do
    local key = ARGV[1] .. 'job:' .. string.format('%.0f', name)
    for i, record in ipairs(redis.call('HMGET', key, unpack(bucket.ids))) do
      if not record then
        return nil
      end
      records[bucket.places[i]] = record
    end
  end
  return records
end

local rows, bytes, place = 0, 0, 3
local limit, byte_limit = math.min(tonumber(ARGV[3]), stop - first), tonumber(ARGV[4])
found[3] = 0
while rows < limit and (rows == 0 or bytes < byte_limit) do
  -- Read about as many rows as fit, by the mean size of the rows so far.
  local some = math.min(limit - rows, 512)
  if rows == 0 then
    some = math.min(some, 32)
  elseif bytes > 0 then
    some = math.min(some, math.ceil((byte_limit - bytes) * rows / bytes))
  end
  local start = first + rows
  local ids = redis.call('ZRANGE', KEYS[2], start, start + some - 1, 'WITHSCORES')
  local records = records_of(ids)
  if not records then
    return without_mark()
  end
  for i, record in ipairs(records) do
    if rows > 0 and bytes >= byte_limit then
      break
    end
    found[place + 1], found[place + 2], found[place + 3] = ids[i * 2 - 1], ids[i * 2], record
    rows, bytes, place = rows + 1, bytes + #record, place + 3
  end
end
if first + rows >= stop then
  found[3] = 1
end
return found
